"""This machine: its GPUs, host memory, cores and processes."""
