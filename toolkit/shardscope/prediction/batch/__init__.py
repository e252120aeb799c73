"""The predicted tier for a search: columns of plans through the formulas of one plan."""
