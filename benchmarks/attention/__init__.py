"""Time of a layer's attention on a GPU, ours beside bare kernels."""
