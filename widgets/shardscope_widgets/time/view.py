"""Where every millisecond goes: what a step waits for, what is hidden, what runs measured, what it costs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from html import escape

import shardscope as ss
from shardscope.timing.report import StepReport
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.numbers import dollars, duration, short, typed_tokens
from shardscope_widgets.kit.sheet import Sheet
from shardscope_widgets.kit.view import View
from shardscope_widgets.pickers.base import Row
from shardscope_widgets.time.calibration import CalibratePanel
from shardscope_widgets.time.figure import draw, empty_figure
from shardscope_widgets.time.rows import RunSteps, ShownStep, shown_step
from shardscope_widgets.time.table import caption, figures, table

MAX_REMEMBERED = 32
"""Measured steps that come back when their plan does."""


class StepView(View):
    """A plan's step, predicted and measured, redrawn in place when ``show`` gets another plan.

    Where the plan is for ``machine`` (None: this one), a button measures that and calls ``on_calibrate``.
    """

    def __init__(
        self,
        plan: ss.Plan | None = None,
        *,
        machine: ss.Cluster | None = None,
        on_calibrate: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_calibrate = on_calibrate
        self.shown: ShownStep | None = None
        self._measured: list[tuple[ss.Plan, RunSteps]] = []
        # A run or a calibration ends in a thread of its own, while a person may move an input.
        self._lock = threading.RLock()
        self.figure = empty_figure()
        self.caption = controls.html("", "ss-hint")
        self.figures = controls.html()
        self.budget = controls.text("15B", "Tokens to train on, as 15T, 300B or 1.5e12", "72px")
        self.budget.observe(self._show_budget, "value")
        self.budget_words = controls.html("", "ss-budget")
        self.budget_row = Row("For tokens", self.budget, self.budget_words)
        self.table = controls.html()
        self.calibrate = CalibratePanel(machine or ss.Cluster.detect(), self._calibrated)
        measuring = [self.calibrate, self.calibrate.words]
        parts = [self.figure, self.caption, *measuring, self.figures, self.budget_row, self.table]
        super().__init__([Sheet("pickers", "time"), *parts])
        for name in ("ss-root", "ss-view", "ss-step"):
            self.add_class(name)
        if plan is not None:
            self.show(plan)

    @property
    def report(self) -> StepReport | None:
        """The prediction that is shown; None while there is none."""
        return self.shown.report if self.shown else None

    def show(self, plan: ss.Plan) -> None:
        """Draw a plan's step; where it cannot be predicted, say why."""
        with self._lock:
            self.calibrate.offer(plan)
            measured = next((step for known, step in self._measured if known == plan), None)
            self.shown = shown_step(plan, measured)
            draw(self.figure, self.shown)
            self.caption.value = caption(self.shown)
            self.figures.value = figures(self.shown)
            self.table.value = table(self.shown)
            self._show_budget()

    def add(self, plan: ss.Plan, measured: RunSteps) -> None:
        """Remember steps that a run of ``plan`` measured; they are shown whenever that plan is."""
        with self._lock:
            others = [(known, step) for known, step in self._measured if known != plan]
            self._measured = [*others, (plan, measured)][-MAX_REMEMBERED:]
            if self.shown is not None and self.shown.plan == plan:
                self.show(plan)

    def _calibrated(self) -> None:
        with self._lock:
            if self.shown is not None:
                self.show(self.shown.plan)
        self._on_calibrate()

    def _show_budget(self, change: object = None) -> None:
        """Days, price and energy of the tokens that are typed; what is no number is said at the input."""
        report = self.report
        self.budget_row.layout.display = "none" if report is None else ""
        self.budget_row.show_error("")
        if report is None:
            return
        try:
            num_tokens = typed_tokens(self.budget.value)
        except ValueError as error:
            self.budget_row.show_error(str(error))
            self.budget_words.value = ""
            return
        steps = num_tokens / report.num_tokens
        parts = [f"<b>{escape(duration(report.days(num_tokens)))}</b> if nothing fails"]
        cost = report.cost(num_tokens)
        if cost is not None:
            parts.append(f"<b>{dollars(cost)}</b>")
        parts.append(f"{short(steps)} steps")
        self.budget_words.value = " · ".join(parts)
