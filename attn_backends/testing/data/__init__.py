"""Data files of the test tools; read through `attn_backends.testing.cases.cases`."""
