"""What would make a plan fit, as buttons that do it."""

from __future__ import annotations

from collections.abc import Callable

import ipywidgets as widgets

import shardscope as ss
from shardscope.memory.report import MemoryReport
from shardscope.planner.repairs import Repair, in_words
from shardscope.planner.room import fits
from shardscope_widgets.kit import controls

MAX_BUTTONS = 10


class RepairsPanel(widgets.VBox):
    """Buttons for ``plan.repairs()`` while the plan does not fit; ``on_apply`` gets the mended plan.

    The same buttons are used again and again: making ten anew at each move of an input would be slow.
    """

    def __init__(self, on_apply: Callable[[ss.Plan], None]) -> None:
        self._on_apply = on_apply
        self._pool: list[widgets.Button] = []
        self._offered: list[Repair] = []
        self.words = controls.html()
        self.buttons = widgets.Box(layout=controls.layout())
        self.buttons.add_class("ss-chips")
        super().__init__([self.words, self.buttons], layout=widgets.Layout(display="none"))
        self.add_class("ss-repairs")

    def offer(self, plan: ss.Plan, report: MemoryReport) -> None:
        """Show what mends ``plan``, or nothing if it fits."""
        enough = fits(plan, report)
        self._offered = [] if enough else plan.repairs()[:MAX_BUTTONS]
        while len(self._pool) < len(self._offered):
            self._pool.append(self._button(len(self._pool)))
        shown = self._pool[: len(self._offered)]
        if self._offered:
            for button, words in zip(shown, in_words(plan, self._offered), strict=True):
                button.description = button.tooltip = words
        if list(self.buttons.children) != shown:
            self.buttons.children = shown
        self.layout.display = "none" if enough else ""
        if not self._offered:
            words = "no single change does: fewer parameters, or more GPUs"
        elif _is_enough(self._offered[0]):  # and so are all others
            words = "one of these makes it fit"
        else:
            most = "these win" if len(self._offered) > 1 else "this wins"
            words = f"no single change is enough, {most} most"
        self.words.value = f"<h2>Make more room <span class='ss-hint'>{words}</span></h2>"

    def _button(self, index: int) -> widgets.Button:
        button = controls.button("", "ss-chip")
        button.on_click(lambda _: self._apply(index))
        return button

    def _apply(self, index: int) -> None:
        # Two quick clicks: after the first, there may be fewer on offer.
        if index < len(self._offered):
            self._on_apply(self._offered[index].plan)


def _is_enough(repair: Repair) -> bool:
    return fits(repair.plan, repair.plan.memory())
