"""Scores predictions against what others and we have measured: ``python -m tests.accuracy``."""
