"""Profiler recordings of all ranks as columns and tiles on one time axis, and memory snapshots."""

from shardscope.trace.store import Trace

__all__ = ["Trace"]
