"""Analyses of a trace: where the time of each rank and step went, and why.

Each is a method of ``Trace`` that returns a plain table. Times are integer nanoseconds until the last
division.
"""
