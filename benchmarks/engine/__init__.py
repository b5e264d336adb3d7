"""Time of whole engines: steps, text, models' products, and until an engine is ready."""
