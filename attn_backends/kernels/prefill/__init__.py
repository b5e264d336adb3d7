"""Prefill by two kernels of ours: rows of any number of query tokens, over keys in pages or one behind the other."""
