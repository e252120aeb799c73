"""The plans view: advice, and the search as chart and table."""
