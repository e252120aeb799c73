"""Predictions of many plans at once, for a search: the formulas of one plan over columns."""
