"""Curves that were measured on this machine, the rates fitted to them, and the files that keep both."""
