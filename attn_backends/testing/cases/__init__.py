"""Cases for the test tools: fixed and random batches, layers and features."""
