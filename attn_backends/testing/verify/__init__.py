"""Random layers and batches against the float64 reference and guard bands: what `attn-backends verify` runs."""
