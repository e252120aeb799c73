"""One folder for each framework; ``registry.py`` is the only list of them."""
