"""TRITON's kernels: one a file, and what a tile of them does."""
