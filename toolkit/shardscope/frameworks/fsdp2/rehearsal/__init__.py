"""FSDP2 rehearsal: torch's ``fully_shard`` on fake tensors."""
