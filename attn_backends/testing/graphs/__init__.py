"""CUDA graphs simulated on a CPU: recorded, replayed, and searched for reads on the host."""
