"""Other engines' calling conventions over our classes: the engine stays as it is, and a backend is chosen by name."""
