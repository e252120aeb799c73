"""PyTorch DistributedDataParallel: layout, formulas, engine, rehearsal and exported files."""
