"""Real training: tasks, data, models, weights, checkpoints, optimizers, the loop, and the engines' base
classes.
"""
