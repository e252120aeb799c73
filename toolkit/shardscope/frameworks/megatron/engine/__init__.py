"""Megatron-core really training."""
