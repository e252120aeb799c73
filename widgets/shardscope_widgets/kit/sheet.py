"""The stylesheet as a widget, with a view's page behaviour: keys, Tab stops and width."""

from __future__ import annotations

import anywidget
import traitlets

from shardscope_widgets.kit.front_end import front_end_text

SCRIPTS = ("keys.js", "roving.js", "focus.js", "announcer.js", "names.js", "saved_picture.js", "sheet.js")


class Sheet(anywidget.AnyWidget):
    """The shared stylesheet plus those of the given view folders: ``Sheet("memory")``.

    Every view with the class ``ss-root`` contains one.
    """

    _esm = front_end_text("kit/front_end", *SCRIPTS)
    _css = front_end_text("kit/front_end", "style.css")
    measures = traitlets.Bool(False, help="Whether the browser reports the view's width.").tag(sync=True)
    width = traitlets.Int(0, help="Pixels; 0 until the view was seen, and without `measures`.").tag(sync=True)

    def __init__(self, *folders: str, measures: bool = False) -> None:
        """Add the ``style.css`` of each of ``folders``, in this order."""
        folder_styles = [front_end_text(folder, "style.css") for folder in folders]
        # anywidget keeps one style element per id, by default the class's: another sheet would replace this
        # one.
        super().__init__(
            _css="\n".join([type(self)._css, *folder_styles]),
            _anywidget_id=".".join(["shardscope.sheet", *folders]),
            measures=measures,
        )

    def show(self) -> None:
        """Scroll to the top of the view, which a button far below may have changed."""
        self.send("show")
