"""What would make a plan fit, as buttons that do it."""

from __future__ import annotations

from collections.abc import Callable

import ipywidgets as widgets

import shardscope as ss
from shardscope.memory.report import MemoryReport
from shardscope.planner.repairs import Repair, in_words

MAX_BUTTONS = 10


class RepairsPanel(widgets.VBox):
    """Buttons for ``plan.repairs()`` while the plan does not fit; ``on_apply`` gets the mended plan."""

    def __init__(self, on_apply: Callable[[ss.Plan], None]) -> None:
        self._on_apply = on_apply
        self.words = widgets.HTML()
        self.words.add_class("ss-hint")
        self.buttons = widgets.Box()
        self.buttons.add_class("ss-chips")
        super().__init__([self.words, self.buttons], layout=widgets.Layout(display="none"))
        self.add_class("ss-repairs")

    def offer(self, plan: ss.Plan, report: MemoryReport) -> None:
        """Show what mends ``plan``, or nothing if it fits."""
        found = [] if report.fits else plan.repairs()[:MAX_BUTTONS]
        before = self.buttons.children
        self.buttons.children = [self._button(plan, repair) for repair in found]
        for old in before:
            old.close()
        self.layout.display = "none" if report.fits else ""
        if not found:
            self.words.value = "No single change makes room: fewer parameters, or more GPUs."
        elif any(repair.plan.memory().fits for repair in found):
            self.words.value = "One of these makes it fit:"
        else:
            self.words.value = "No single change is enough. These win most:"

    def _button(self, plan: ss.Plan, repair: Repair) -> widgets.Button:
        words = in_words(plan, repair)
        button = widgets.Button(description=words, tooltip=words)
        button.add_class("ss-chip")
        button.on_click(lambda _: self._on_apply(repair.plan))
        return button
