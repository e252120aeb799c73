"""Lines of a log in the browser: they follow the end, or stay where a reader is."""

from __future__ import annotations

import anywidget
import traitlets

from shardscope_widgets.kit.front_end import front_end_text


class LogPane(anywidget.AnyWidget):
    """Lines that keep their place while more arrive; the browser decides when it shows them."""

    _esm = front_end_text("kit/front_end", "keys.js") + front_end_text("run", "log_pane.js")
    value = traitlets.Unicode(help="HTML; what ranks printed is escaped.").tag(sync=True)
    key = traitlets.Unicode(help="Of what it shows lines; another key is shown at once.").tag(sync=True)
    name = traitlets.Unicode("log", help="What it is, for those who cannot see it.").tag(sync=True)
