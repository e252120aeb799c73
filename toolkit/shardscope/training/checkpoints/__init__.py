"""Checkpoints: written, signed, chosen, and read without executing what is in them."""
