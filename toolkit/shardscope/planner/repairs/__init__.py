"""Changes that make a plan fit or save memory: single ones, combinations, and a framework's first layout."""
