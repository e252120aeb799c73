"""PyTorch FSDP2 (``fully_shard``)."""
