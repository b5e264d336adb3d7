"""Attention backends, one module each; reached by name through `attn_backends.registry`."""
