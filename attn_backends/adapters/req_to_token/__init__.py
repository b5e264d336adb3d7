"""Attention for engines with a table of token slots a request (pymllm, SGLang)."""
