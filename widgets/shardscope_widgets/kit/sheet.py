"""The stylesheet as a widget, with what a view needs of the page: keys, Tab stops and its width."""

from __future__ import annotations

import anywidget
import traitlets

from shardscope_widgets.kit.front_end import front_end_text


class Sheet(anywidget.AnyWidget):
    """The shared stylesheet and those of the named view folders: ``Sheet("memory")``.

    Every view whose class list has ``ss-root`` contains one.
    """

    _esm = front_end_text("kit/front_end", "keys.js", "roving.js", "sheet.js")
    _css = front_end_text("kit/front_end", "style.css")
    measures = traitlets.Bool(False, help="Whether the browser reports the view's width.").tag(sync=True)
    width = traitlets.Int(0, help="Pixels; 0 until the view was seen, and without `measures`.").tag(sync=True)

    def __init__(self, *folders: str, measures: bool = False) -> None:
        """``folders``: the view folders whose ``style.css`` is added, in this order."""
        own = [front_end_text(folder, "style.css") for folder in folders]
        super().__init__(
            _css="\n".join([type(self)._css, *own]),
            # anywidget gives an id one <style> element, which the last widget of this id overwrites. Its
            # default is the class, so that the sheets of two views would take each other's place.
            _anywidget_id=" ".join([f"{type(self).__module__}.{type(self).__name__}", *folders]),
            measures=measures,
        )

    def show(self) -> None:
        """Scroll the top of the view into sight: a button far below it may have changed what is there."""
        self.send("show")
