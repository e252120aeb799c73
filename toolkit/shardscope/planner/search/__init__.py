"""``ss.search``: every layout, micro-batch and recomputation of every framework, evaluated and ranked."""
