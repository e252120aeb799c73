"""The predicted tier: memory and step of one plan, and of many at once."""
