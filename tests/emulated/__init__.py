"""Kernel packages played on a CPU: the same names, checks and plans, so that backends run without a GPU."""
