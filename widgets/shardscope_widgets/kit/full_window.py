"""The button that gives a view the whole window, and gives it back."""

from __future__ import annotations

import anywidget

from shardscope_widgets.kit import controls
from shardscope_widgets.kit.front_end import front_end_text


class FullWindow(anywidget.AnyWidget):
    """Lets the ``ss-root`` around it fill the browser's window. The kernel has no part in it."""

    _esm = front_end_text("kit/front_end", "full_window.js")

    def __init__(self) -> None:
        super().__init__(layout=controls.layout(flex="0 0 auto"))
        self.add_class("ss-full-window")
