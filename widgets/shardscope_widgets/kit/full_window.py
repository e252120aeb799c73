"""The button that expands a view to the whole browser window and back."""

from __future__ import annotations

import anywidget

from shardscope_widgets.kit import controls
from shardscope_widgets.kit.front_end import front_end_text


class FullWindow(anywidget.AnyWidget):
    """A button that lets the enclosing ``ss-root`` fill the browser window, entirely in the front end."""

    _esm = front_end_text("kit/front_end", "full_window.js")

    def __init__(self) -> None:
        super().__init__(layout=controls.share_layout(flex="0 0 auto"))
        self.add_class("ss-full-window")
