"""Hugging Face Accelerate and its Trainer: a wrapper around other frameworks, not one of the registry."""
