"""What a running run is looked at for: hangs, GPUs, the host, stacks, its pace."""
