"""Time of a layer's attention, ours beside bare kernels and other engines."""
