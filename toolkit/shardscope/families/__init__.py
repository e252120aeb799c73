"""What is known of each model family: its config.json, its names of parameters, what it can and cannot be."""
