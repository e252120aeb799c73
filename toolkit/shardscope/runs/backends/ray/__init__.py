"""Runs on a Ray cluster: the target, the processes on its nodes, and what comes back from them."""
