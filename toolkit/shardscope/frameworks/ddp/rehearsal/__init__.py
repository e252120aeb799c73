"""DDP rehearsal: torch's ``DistributedDataParallel`` on fake tensors."""
