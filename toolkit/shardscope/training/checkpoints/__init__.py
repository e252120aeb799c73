"""Checkpoints: written, proved to be this user's own, chosen, and read without running anything."""
