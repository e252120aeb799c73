"""FSDP2's part of the memory formulas: what it keeps on one rank, and when."""
