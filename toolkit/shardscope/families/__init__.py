"""Model families: their config.json, parameter names and shapes, and the fields that each family allows."""
