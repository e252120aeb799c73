"""Watching a run while it trains: hangs, stacks, GPUs, host memory and pace."""
