"""Optimizers, gradient clipping and the learning-rate schedule."""
