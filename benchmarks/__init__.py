"""What measures, and what was measured: `python -m benchmarks` lists it."""
