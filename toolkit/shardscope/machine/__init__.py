"""What this machine is: its GPUs, host memory, cores and processes."""
