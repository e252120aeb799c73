"""Weights of transformers as Megatron's, and back."""
