"""The Studio's Trace tab."""

from __future__ import annotations

from html import escape

import ipywidgets as widgets

import shardscope as ss
from shardscope_widgets.kit import controls
from shardscope_widgets.trace.view import TraceView

NO_TRACE = 'No trace yet. Launch a run with "Record a trace" checked, or open a trace in the Runs tab.'


class TracePage(widgets.VBox):
    """The Studio's Trace tab: the trace of one run, or a hint."""

    def __init__(self, height: int) -> None:
        self._height = height
        super().__init__([_create_hint(NO_TRACE)])

    def show_run(self, run: ss.Run) -> None:
        """Show the trace of ``run``, or why it has none."""
        try:
            self._replace(TraceView(run.trace(), height=self._height))
        except (ValueError, OSError) as error:
            self.show_hint(str(error))

    def show_hint(self, text: str) -> None:
        """Show ``text`` instead of a trace."""
        self._replace(_create_hint(text))

    def _replace(self, view: widgets.Widget) -> None:
        # Replace first: closing a widget that is still displayed would show an error. The view before it may
        # hold a whole trace.
        before, self.children = self.children, [view]
        for old in before:
            old.close()


def _create_hint(text: str) -> widgets.HTML:
    return controls.create_html(escape(text), "ss-hint")
