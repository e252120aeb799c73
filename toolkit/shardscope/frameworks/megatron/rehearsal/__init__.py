"""Megatron-core's own code on fake tensors."""
