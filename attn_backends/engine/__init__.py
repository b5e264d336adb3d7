"""A small engine that runs Hugging Face models on any registered backend."""
