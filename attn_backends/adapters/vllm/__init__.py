"""Our backends inside vLLM, by its plugin entry point: `plugin` has the names, `builder` and `layers` do the work."""
