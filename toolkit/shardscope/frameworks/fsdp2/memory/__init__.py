"""What FSDP2 keeps on one rank, and when."""
