"""All ranks of a trace on one time axis."""

from shardscope_widgets.trace.view import TracePage, TraceView

__all__ = ["TracePage", "TraceView"]
