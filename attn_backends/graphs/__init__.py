"""CUDA graphs: who captures and replays, and what captured steps read."""
