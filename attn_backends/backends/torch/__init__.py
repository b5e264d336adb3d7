"""TORCH: paged attention in plain torch, on any device, and in C on a CPU. The one to read first."""
