"""Clickable HTML: tables with sortable headings, and with rows and buttons that trigger actions."""

from __future__ import annotations

from collections.abc import Callable

import anywidget
import traitlets

from shardscope_widgets.kit import controls
from shardscope_widgets.kit.front_end import front_end_text

SHOWN_CHARACTERS = 60


class IgnoredError(ValueError):
    """The error for an unknown action: it is shown, and the click has no other effect."""

    def __init__(self, act: object) -> None:
        shown = repr(act)
        cut = "..." * (len(shown) > SHOWN_CHARACTERS)
        super().__init__(
            f"Ignored: {shown[:SHOWN_CHARACTERS]}{cut} is not an action of this view, or not any more."
        )


def _ignore_press(act: str) -> None:
    raise IgnoredError(act)


def _ignore_answer(act: str, typed: str) -> None:
    raise IgnoredError(act)


class Clickable(anywidget.AnyWidget):
    """An HTML widget; clicking an element with ``data-act='...'`` calls ``on_act`` with that value.

    If an ``input`` has the same value as its ``data-answer``, ``on_answer`` receives it and the typed text.
    Both raise ``IgnoredError`` for unknown values; ``on_answer`` also raises ``ValueError`` for invalid
    text.

    In an element with ``data-roving``, Tab stops once and the arrow keys move between its buttons and
    links (``front_end/roving.js``); the view's ``Sheet`` enables this.

    One model serves a whole table: a widget per button would slow down page loading.
    """

    _esm = front_end_text("kit/front_end", "keys.js", "clickable.js")
    value = traitlets.Unicode(help="HTML. Whatever comes from outside is escaped by who writes it.").tag(
        sync=True
    )

    error = traitlets.Unicode(help="What is wrong with what the page sent last.").tag(sync=True)
    frozen = traitlets.Bool(False, help="Whether nothing can be pressed, and looks so.").tag(sync=True)

    def __init__(
        self,
        on_act: Callable[[str], None] = _ignore_press,
        *classes: str,
        on_answer: Callable[[str, str], None] = _ignore_answer,
    ) -> None:
        super().__init__(layout=controls.share_layout())
        self._on_act, self._on_answer = on_act, on_answer
        self.add_class("ss-clickable")
        controls.add_classes(self, *classes)
        self.on_msg(self._handle_message)

    def press_button(self, act: str) -> None:
        """Handle a click by the user on the element with this ``data-act``."""
        self._handle_input(act, lambda: self._on_act(act), IgnoredError)

    def open_row(self, key: str) -> None:
        """Open a row of :func:`~shardscope_widgets.kit.part_table.render_part_table`, scrolled into view."""
        self.send({"open": key})

    def submit_text(self, act: str, typed: str) -> None:
        """Handle text that the user typed into an input with this ``data-answer``."""
        self._handle_input(act, lambda: self._on_answer(act, typed), ValueError)

    def _handle_input(self, act: str, handle: Callable[[], None], reported_errors: type[ValueError]) -> None:
        try:
            if self.frozen:  # The click was sent before the content changed.
                raise IgnoredError(act)
            handle()
        except reported_errors as error:
            self.error = str(error)
        else:
            self.error = ""

    def _handle_message(self, _: object, content: object, __: object) -> None:
        # An exception raised here would not be shown: whatever the page sends by mistake is reported instead.
        match content:
            case {"act": str(act), "answer": str(typed)}:
                self.submit_text(act, typed)
            case {"act": str(act)}:
                self.press_button(act)
            case _:
                self.error = str(IgnoredError(content))

    @traitlets.observe("value")
    def _clear_error(self, _: object) -> None:
        self.error = ""
