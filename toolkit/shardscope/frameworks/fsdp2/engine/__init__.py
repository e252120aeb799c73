"""FSDP2 really training."""
