"""HTML that a person presses: tables whose headings sort, whose rows and buttons do something."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anywidget
import traitlets

from shardscope_widgets.kit import controls
from shardscope_widgets.kit.front_end import front_end_text

SHOWN_CHARACTERS = 60


class IgnoredError(ValueError):
    """What was pressed means nothing here: it is said, and nothing else happens."""

    def __init__(self, act: object) -> None:
        shown = repr(act)
        cut = "..." * (len(shown) > SHOWN_CHARACTERS)
        super().__init__(f"Ignored: {shown[:SHOWN_CHARACTERS]}{cut} means nothing here, or not any more.")


def _not_asked(act: str, typed: str) -> None:
    raise IgnoredError(act)


class Clickable(anywidget.AnyWidget):
    """Shows ``value``; pressing an element with ``data-act='...'`` calls ``on_act`` with these words.

    Where an ``input`` has the same words as its ``data-answer``, ``on_answer`` gets them and what was typed.
    Both raise ``IgnoredError`` for words that they do not know; ``on_answer`` also ``ValueError`` for what
    was typed.

    In an element with ``data-roving``, Tab stops once and arrow keys move between its buttons, links and rows
    (``front_end/roving.js``); the view's ``Sheet`` sees to it.

    One model for a whole table: a widget for each of its buttons would cost a reloaded page its time.
    """

    _esm = front_end_text("kit/front_end", "keys.js", "clickable.js")
    value = traitlets.Unicode(help="HTML. Whatever comes from outside is escaped by who writes it.").tag(
        sync=True
    )

    error = traitlets.Unicode(help="What is wrong with what the page sent last.").tag(sync=True)
    frozen = traitlets.Bool(False, help="Whether nothing can be pressed, and looks so.").tag(sync=True)

    def __init__(
        self,
        on_act: Callable[[str], None],
        *classes: str,
        on_answer: Callable[[str, str], None] = _not_asked,
    ) -> None:
        super().__init__(layout=controls.layout())
        self._on_act, self._on_answer = on_act, on_answer
        self.add_class("ss-clickable")
        for name in classes:
            self.add_class(name)
        self.on_msg(self._heard)

    def press(self, act: str) -> None:
        """What a person's click on the element with this ``data-act`` does."""
        self._tell(act, lambda: self._on_act(act), IgnoredError)

    def open_row(self, key: str) -> None:
        """Open the row of a :func:`~shardscope_widgets.kit.part_table.part_table` and scroll it into view."""
        self.send({"open": key})

    def answer(self, act: str, typed: str) -> None:
        """What it does beside an input in which they typed something."""
        self._tell(act, lambda: self._on_answer(act, typed), ValueError)

    def _tell(self, act: str, do: Callable[[], None], said: type[ValueError]) -> None:
        try:
            if self.frozen:  # A click that was sent a moment before.
                raise IgnoredError(act)
            do()
        except said as error:
            self.error = str(error)
        else:
            self.error = ""

    def _heard(self, _: object, content: Any, __: object) -> None:
        match content:
            case {"act": str(act), "answer": str(typed)}:
                self.answer(act, typed)
            case {"act": str(act)}:
                self.press(act)
            case _:
                self.error = str(IgnoredError(content))

    @traitlets.observe("value")
    def _drawn_anew(self, _: object) -> None:
        self.error = ""
