"""The DDP engine, which really trains."""
