"""All ranks of a trace on one time axis."""

from shardscope_widgets.trace_view.view import TraceView

__all__ = ["TraceView"]
