"""Scrolling of the Trace tab to its drawing, which a table below it may have moved out of sight."""

from __future__ import annotations

import anywidget

from shardscope_widgets.kit import controls
from shardscope_widgets.kit.front_end import front_end_text


class ScrollToNext(anywidget.AnyWidget):
    """An invisible widget that scrolls the widget after it into sight."""

    _esm = front_end_text("trace", "scroll.js")

    def __init__(self) -> None:
        super().__init__(layout=controls.share_layout())

    def scroll(self) -> None:
        """Scroll as far as needed, not at all if all of the next widget is in sight."""
        self.send("show")
