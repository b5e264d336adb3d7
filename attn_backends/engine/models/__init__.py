"""A model that calls our attention, by one door (`LoadedModel`)."""
