"""Explanations of a run: why it failed, what it measured, and how that compares with others and its
prediction.
"""
