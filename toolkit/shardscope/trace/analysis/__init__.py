"""Summaries of a trace, computed from its columns."""
