"""FSDP2's own code on fake tensors."""
