"""The plans view: advice, and the search results as a chart and a table."""
