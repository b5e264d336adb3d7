"""Time of the host alone: metadata, plans, forwards, the engine."""
