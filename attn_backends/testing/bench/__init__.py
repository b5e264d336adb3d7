"""What `attn-backends bench` runs: loads, one backend's layer at a load, clocks, and a run within its minutes."""
