"""Weights of transformers converted to Megatron-core's, and back."""
