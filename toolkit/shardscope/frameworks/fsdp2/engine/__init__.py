"""The FSDP2 engine, which really trains."""
