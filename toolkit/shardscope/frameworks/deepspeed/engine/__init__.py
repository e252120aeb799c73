"""The DeepSpeed engine, which really trains."""
