"""Soak of launches on Slurm and Ray: faults drawn from a seed, and each launch must leave nothing behind."""
