"""How long a step takes: the first-order pieces, good enough to compare two plans of the same model."""
