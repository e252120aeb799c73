"""Hugging Face Accelerate, a wrapper around the frameworks of the registry: the user's own scripts, and
its configuration files read.
"""
