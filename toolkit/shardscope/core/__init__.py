"""What the user describes: a model, GPUs, what to train, how to spread it; and refusals of bad values."""
