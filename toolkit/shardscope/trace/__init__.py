"""Profiler recordings of all ranks of a run, as columns on one time axis."""

from shardscope.trace.store import Trace

__all__ = ["Trace"]
