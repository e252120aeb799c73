"""Weights on disk: read by the names that a model has for them, and written as transformers opens them."""
