"""What DDP keeps on one rank, and when."""
