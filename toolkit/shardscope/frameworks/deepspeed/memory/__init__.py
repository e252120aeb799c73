"""What DeepSpeed keeps on one rank, and when."""
