"""What writes the generated pages of docs/: measurements with charts, and the support matrix."""
