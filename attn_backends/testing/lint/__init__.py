"""Lint: what a backend accepts and does not use, found by running it and by reading its code. Needs no pytest."""
