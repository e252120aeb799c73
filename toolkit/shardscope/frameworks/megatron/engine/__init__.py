"""The Megatron-core engine, which really trains."""
