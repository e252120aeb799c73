"""Optimizers, the norm of gradients, and the learning rate of each step."""
