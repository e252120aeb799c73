"""What the user describes: a model, GPUs, what to train and how to spread it; and how a bad value is refused."""
