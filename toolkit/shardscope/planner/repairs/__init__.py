"""Changes that make a plan fit, or fit better: single ones, several together, and a first layout."""
