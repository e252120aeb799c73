"""Collapsible questions: one line with the answer, and the inputs below it while it is open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import anywidget
import ipywidgets as widgets
import traitlets

from shardscope_widgets.kit import controls
from shardscope_widgets.kit.front_end import front_end_text

MAX_OPEN = 2
"""Maximum number of folds of a column that the user has open, so that it fits on the screen."""


class FoldHead(anywidget.AnyWidget):
    """The header of one question: its title, its answer, and whether its inputs are shown."""

    _esm = front_end_text("kit/front_end", "fold.js")
    title = traitlets.Unicode().tag(sync=True)
    answer = traitlets.Unicode(help="The current answer, shown while the fold is closed.").tag(sync=True)
    expanded = traitlets.Bool(False, help="Whether the inputs are shown.").tag(sync=True)
    wrong = traitlets.Bool(False, help="Whether an input inside carries an error message.").tag(sync=True)


class HeadChange(TypedDict):
    """The change of a boolean trait of a fold's header, as traitlets reports it."""

    owner: FoldHead
    new: bool


class Fold(widgets.VBox):
    """One collapsible question. :attr:`head` is its header; the stylesheet hides ``body`` while closed."""

    def __init__(self, title: str, *body: widgets.Widget, is_open: bool = False) -> None:
        self.head = FoldHead(title=title, expanded=is_open, layout=controls.share_layout())
        self.head.add_class("ss-fold-head")
        self.body = widgets.VBox(list(body), layout=controls.share_layout())
        self.body.add_class("ss-fold-body")
        super().__init__([self.head, self.body], layout=controls.share_layout())
        self.add_class("ss-fold")

    def follow_picker(self, picker: widgets.Widget) -> None:
        """Show ``picker.answer`` in the header, and open the fold when ``picker.is_wrong`` becomes true."""
        traitlets.dlink((picker, "answer"), (self.head, "answer"))
        if picker.has_trait("is_wrong"):
            picker.observe(self._show_error, "is_wrong")

    def _show_error(self, change: dict[str, bool]) -> None:
        self.head.wrong = change["new"]
        if change["new"]:
            self.head.expanded = True


class Folds(widgets.VBox):
    """A column of questions of which at most :data:`MAX_OPEN` are open, the most recently opened ones."""

    def __init__(self, folds: Sequence[Fold]) -> None:
        self.folds = list(folds)
        self._opened = [fold.head for fold in folds if fold.head.expanded]
        super().__init__(self.folds, layout=controls.share_layout())
        self.add_class("ss-folds")
        for fold in folds:
            fold.head.observe(self._keep_few_open, "expanded")

    def _keep_few_open(self, change: HeadChange) -> None:
        head = change["owner"]
        self._opened = [other for other in self._opened if other is not head]
        if change["new"]:
            self._opened.append(head)
            # An error opens its question while the user is typing in another one, which must not close.
            if head.wrong:
                return
        # A question with an error stays open so that its message is visible.
        closable = [other for other in self._opened if not other.wrong and other is not head]
        for other in closable[: max(0, len(self._opened) - MAX_OPEN)]:
            other.expanded = False
