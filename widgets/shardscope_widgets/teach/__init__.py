"""Figures that teach: a pipeline's schedule, the slices of every rank, and the GPU's roofline."""
