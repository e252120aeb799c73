"""DDP really training."""
