"""Tensors that each family's modules save for backward, listed one by one, in bytes for one token."""
