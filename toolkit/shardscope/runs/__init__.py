"""Launching, watching and stopping real training: one run is one folder on disk."""
