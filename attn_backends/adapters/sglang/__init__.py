"""Any backend by name inside SGLang, as one of its attention backends."""
