"""The conformance kit's cases by subject; `attn_backends.testing.conformance` joins them into one class."""
