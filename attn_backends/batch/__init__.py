"""One step's batch, from page lists: tables, the common metadata, its order, and its views."""
