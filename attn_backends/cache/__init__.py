"""The paged cache: its tensors, and the kernels that write, quantise and copy."""
