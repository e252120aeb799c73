"""Where every byte goes: bars against what the card has, one step's course, and a table that explains."""

from __future__ import annotations

import threading

import ipywidgets as widgets

import shardscope as ss
from shardscope.memory.report import MemoryReport
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.sheet import Sheet
from shardscope_widgets.kit.view import View
from shardscope_widgets.memory.figure import draw, empty_figure
from shardscope_widgets.memory.rehearsal import RehearsePanel
from shardscope_widgets.memory.rows import Shown
from shardscope_widgets.memory.table import caption, table

MAX_REMEMBERED = 32
"""Reports of rehearsals and runs that come back when their plan does."""


class MemoryView(View):
    """A plan's memory in every tier that there is, redrawn in place when ``show`` gets another plan.

    ``MemoryView(plan, other_plan)`` puts two plans side by side: A, and B, with the differences named.
    """

    def __init__(self, plan: ss.Plan | None = None, other_plan: ss.Plan | None = None) -> None:
        self.report: MemoryReport | None = None
        self.plan: ss.Plan | None = None
        self._kept: ss.Plan | None = None
        self._remembered: list[tuple[ss.Plan, MemoryReport]] = []
        # A rehearsal or a run ends in a thread of its own, while a person may move an input: who draws last
        # draws what is the case then.
        self._lock = threading.RLock()
        self.mode = controls.segments([("at the peak", "peak"), ("over one step", "step")], "Memory")
        self.mode.observe(self._draw, "value")
        self.keep = controls.button(
            "Keep as A", "ss-ghost", "ss-small", tooltip="Keep this plan to compare others with it"
        )
        self.keep.on_click(self._keep_or_let_go)
        self.rehearse = RehearsePanel(on_report=self.add)
        bar = widgets.HBox([self.mode, self.keep, self.rehearse], layout=controls.layout())
        bar.add_class("ss-toolbar")
        self.figure = empty_figure()
        self.caption = controls.html("", "ss-hint")
        self.table = controls.html()
        super().__init__([Sheet("memory"), bar, self.rehearse.words, self.figure, self.caption, self.table])
        self.add_class("ss-root")
        self.add_class("ss-memory")
        if plan is not None and other_plan is not None:
            self.show(other_plan)
            self.compare(plan)
        elif plan is not None:
            self.show(plan)

    def show(self, plan: ss.Plan, report: MemoryReport | None = None) -> None:
        """Draw a plan's memory; ``report`` saves asking the plan again."""
        report = report or plan.memory()
        with self._lock:
            self.plan, self.report = plan, report
            self.rehearse.offer(plan)
            self._draw()

    def compare(self, kept: ss.Plan | None) -> None:
        """Keep a plan as A beside what is shown (B); None lets go of it."""
        with self._lock:
            self._kept = kept
            self.keep.description = "Keep as A" if kept is None else "Let go of A"
            self._draw()

    def add(self, plan: ss.Plan, report: MemoryReport) -> None:
        """Remember a rehearsed or measured report; it is shown whenever its plan is."""
        with self._lock:
            others = [
                (known, old)
                for known, old in self._remembered
                if not (known == plan and old.tier == report.tier)
            ]
            self._remembered = [*others, (plan, report)][-MAX_REMEMBERED:]
            self._draw()

    @property
    def shown(self) -> Shown | None:
        """What is drawn: the plan, its reports by tier, and the plan kept as A."""
        if self.plan is None or self.report is None:
            return None
        plan, kept = self.plan, self._kept
        reports = {"predicted": self.report, **self._seen(plan)}
        if kept is None:
            return Shown(plan, reports)
        return Shown(plan, reports, kept, {"predicted": kept.memory(), **self._seen(kept)})

    def _seen(self, plan: ss.Plan) -> dict[str, MemoryReport]:
        """What was rehearsed and measured of a plan, by tier."""
        return {report.tier: report for known, report in self._remembered if known == plan}

    def _keep_or_let_go(self, _: object) -> None:
        self.compare(self.plan if self._kept is None else None)

    def _draw(self, change: object = None) -> None:
        with self._lock:
            shown = self.shown
            if shown is None:
                return
            draw(self.figure, shown, self.mode.value)
            self.caption.value = caption(shown)
            self.table.value = table(shown)
