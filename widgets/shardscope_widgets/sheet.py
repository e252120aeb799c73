"""The stylesheet as a widget of its own, which also keeps charts as wide as their place."""

from __future__ import annotations

from importlib.resources import files

import anywidget
import traitlets


def _front_end(name: str) -> str:
    # The text, not the path: a file-backed front end keeps every instance alive (anywidget#929).
    return (files(__package__) / "front_end" / name).read_text(encoding="utf-8")


class Sheet(anywidget.AnyWidget):
    """Put one inside each view that carries the class ``ss-root``."""

    _esm = _front_end("sheet.js")
    _css = _front_end("style.css") + _front_end("run.css")
    measures = traitlets.Bool(False, help="Whether the browser tells the view's width.").tag(sync=True)
    width = traitlets.Int(0, help="Pixels; 0 until the view was seen, and without `measures`.").tag(sync=True)

    def show(self) -> None:
        """Bring the top of the view into sight: a button far below it may have changed what stands there."""
        self.send("show")
