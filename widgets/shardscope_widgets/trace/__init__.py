"""All ranks of a trace on one time axis."""

from shardscope_widgets.trace.page import TracePage
from shardscope_widgets.trace.view import TraceView

__all__ = ["TracePage", "TraceView"]
