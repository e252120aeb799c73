"""HTML that a person presses: tables whose headings sort, whose rows and buttons do something."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anywidget
import traitlets

from shardscope_widgets import shared
from shardscope_widgets.front_end_text import front_end_text

SHOWN_CHARACTERS = 60


class IgnoredError(ValueError):
    """What was pressed means nothing here: it is said, and nothing else happens."""

    def __init__(self, act: object) -> None:
        shown = repr(act)
        cut = "..." * (len(shown) > SHOWN_CHARACTERS)
        super().__init__(f"Ignored: {shown[:SHOWN_CHARACTERS]}{cut} means nothing here, or not any more.")


class Clickable(anywidget.AnyWidget):
    """Shows ``value``; pressing an element with ``data-act='...'`` calls ``on_act`` with these words.

    ``on_act`` raises ``IgnoredError`` for words that it does not know.

    One model for a whole table: a widget for each of its buttons would cost a reloaded page its time.
    """

    _esm = front_end_text("clickable.js")
    value = traitlets.Unicode(help="HTML. Whatever comes from outside is escaped by who writes it.").tag(
        sync=True
    )

    error = traitlets.Unicode(help="What the page sent last, if it means nothing.").tag(sync=True)
    frozen = traitlets.Bool(False, help="Whether nothing can be pressed, and looks so.").tag(sync=True)

    def __init__(self, on_act: Callable[[str], None], *classes: str) -> None:
        super().__init__(layout=shared.layout())
        self._on_act = on_act
        self.add_class("ss-clickable")
        for name in classes:
            self.add_class(name)
        self.on_msg(self._heard)

    def press(self, act: str) -> None:
        """What a person's click on the element with this ``data-act`` does."""
        try:
            if self.frozen:  # A click that was sent a moment before.
                raise IgnoredError(act)
            self._on_act(act)
        except IgnoredError as ignored:
            self.error = str(ignored)
        else:
            self.error = ""

    def _heard(self, _: object, content: Any, __: object) -> None:
        act = content.get("act") if isinstance(content, dict) else None
        if isinstance(act, str):
            self.press(act)
        else:
            self.error = str(IgnoredError(content))

    @traitlets.observe("value")
    def _drawn_anew(self, _: object) -> None:
        self.error = ""
