"""What Megatron-core keeps on one rank, and when."""
