"""What benchmarks share: timing, the machine's description, results."""
