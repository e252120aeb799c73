"""PyTorch FSDP2 (``fully_shard``): layout, formulas, engine, rehearsal and exported files."""
