"""The lines of a log in the browser: it follows the end, or keeps the user's scroll position."""

from __future__ import annotations

import anywidget
import traitlets

from shardscope_widgets.kit.front_end import front_end_text


class LogPane(anywidget.AnyWidget):
    """A pane that keeps its scroll position while lines arrive; the browser decides when to show them."""

    _esm = front_end_text("kit/front_end", "keys.js") + front_end_text("run", "log_pane.js")
    value = traitlets.Unicode(help="HTML; the output of ranks is escaped in it.").tag(sync=True)
    key = traitlets.Unicode(help="Identifies log and search; lines of another key are shown at once.").tag(
        sync=True
    )
    num_runs = traitlets.Int(0, help="Runs shown so far; the view scrolls up for another one.").tag(sync=True)
    name = traitlets.Unicode("log", help="Name for screen readers.").tag(sync=True)
    follow_label = traitlets.Unicode(
        "New lines: follow the log", help="Button for a reader who has scrolled up."
    ).tag(sync=True)
