"""DDP engine, which runs the training."""
