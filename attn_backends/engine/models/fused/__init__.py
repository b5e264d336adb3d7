"""Decoder layers of the Llama form with fewer operations, and products with merged or packed weights."""
