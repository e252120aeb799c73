"""FSDP2 engines, which run the training."""
