"""DDP's own code on fake tensors."""
