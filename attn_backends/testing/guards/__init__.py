"""What shows writes and reads beyond tensors, and changes of what was to stay."""
