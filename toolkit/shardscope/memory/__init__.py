"""The memory formulas that all frameworks share, and the memory report."""
