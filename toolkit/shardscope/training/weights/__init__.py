"""Weights on disk: safetensors folders checked, read by a model's own names, and written for transformers."""
