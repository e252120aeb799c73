"""Checks of code exercises on one rank: the learner's code, its collectives, and one process to compare with.

Every rank computes the reference alone, from the data of all ranks, so that the checks send nothing. Ranks
meet through files: a collective of theirs could pair with one that the learner's code left open.
"""
