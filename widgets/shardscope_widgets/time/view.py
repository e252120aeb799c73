"""The time view: parts of a step, overlapped time, measured runs, rates, prices and pinned plans."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING

import ipywidgets as widgets

import shardscope as ss
from shardscope.timing.report import StepReport
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.background_work import Progress, WorkPanel
from shardscope_widgets.kit.clickable import Clickable
from shardscope_widgets.kit.numbers import format_dollars, format_duration, format_short, parse_tokens
from shardscope_widgets.kit.pins import Pins
from shardscope_widgets.kit.sheet import Sheet
from shardscope_widgets.kit.view import View
from shardscope_widgets.pickers.base import Row
from shardscope_widgets.time.figure import create_step_figure, draw_step
from shardscope_widgets.time.rows import RunSteps, ShownStep, build_shown_step
from shardscope_widgets.time.table import render_part_rows, render_rate_table, write_caption

if TYPE_CHECKING:
    from shardscope.timing.calibration.curves import Calibration


CALIBRATE_LABEL = "Measure this machine"


class CalibratePanel(WorkPanel):
    """A button for ``ss.calibrate()``, for plans of this machine; ``on_done`` is called at the end."""

    def __init__(self, machine: ss.Cluster, on_done: Callable[[], None]) -> None:
        self._machine = machine
        self._on_done = on_done
        self._cluster: ss.Cluster | None = None
        super().__init__(
            CALIBRATE_LABEL,
            "Benchmark matmuls, memory, links and collectives (about a minute) for more accurate predictions",
            self._start_calibration,
        )
        self.layout.display = "none"

    def show_for_plan(self, plan: ss.Plan) -> None:
        """Show the button if ``plan`` is for GPUs, or CPU ranks, of this machine."""
        cluster, machine = plan.cluster, self._machine
        # CPU ranks share one processor, so any number of them can be measured.
        is_here = (
            cluster.num_nodes == 1
            and cluster.gpu.name == machine.gpu.name
            and (cluster.gpus_per_node <= machine.gpus_per_node or not plan.on_gpu)
        )
        self._cluster = cluster if is_here else None
        self.layout.display = "" if is_here or self.is_busy else "none"

    def _start_calibration(self) -> None:
        cluster = self._cluster
        if cluster is None:
            return

        def calibrate(progress: Progress) -> Calibration:
            return ss.calibrate(cluster, progress=progress)

        self.start(calibrate, lambda _: self._on_done(), lambda _, seconds: f"Measured in {seconds:.0f} s.")


MAX_REMEMBERED = 32
"""Maximum stored measurements, which are shown again with their plan."""


class StepView(View):
    """A plan's step, predicted and measured, redrawn in place when :meth:`show` receives another plan.

    If the plan is for ``machine`` (None: this one), a button calibrates it and calls ``on_calibrate``.
    ``on_pin`` receives the plan whose pin button was pressed and sets :attr:`pins`; None: the view stores
    its own pins.
    """

    def __init__(
        self,
        plan: ss.Plan | None = None,
        *,
        machine: ss.Cluster | None = None,
        pins: Sequence[ss.Plan] = (),
        on_calibrate: Callable[[], None] = lambda: None,
        on_pin: Callable[[ss.Plan], None] | None = None,
    ) -> None:
        self._on_calibrate = on_calibrate
        self.shown: ShownStep | None = None
        self._measured: list[tuple[ss.Plan, RunSteps]] = []
        # A run or a calibration ends in its own thread while the user may change an input.
        self._lock = threading.RLock()
        self._pins = Pins(self._redraw, on_pin)
        self.calibrate = CalibratePanel(machine or ss.Cluster.detect(), self._show_calibration)
        actions = widgets.HBox([self._pins.button], layout=controls.share_layout())
        actions.add_class("ss-actions")
        bar = widgets.HBox([self.calibrate, self.calibrate.words, actions], layout=controls.share_layout())
        bar.add_class("ss-toolbar")
        self.table = Clickable(self._pins.press_button)
        self.figure = create_step_figure(self.table.open_row)
        self.caption = controls.create_html("", "ss-hint", "ss-caption")
        self.figures = Clickable(self._pins.press_button)
        self.budget = controls.create_text_box(
            "15B", "Number of training tokens, such as 15T, 300B or 1.5e12", "72px"
        )
        self.budget.observe(self._show_budget, "value")
        self.budget_words = controls.create_html("", "ss-budget")
        self.budget_row = Row("Tokens", self.budget, self.budget_words)
        parts = [bar, self.figure, self.caption, self.figures, self.budget_row, self.table]
        super().__init__([Sheet("pickers", "memory", "time"), *parts])
        controls.add_classes(self, "ss-root", "ss-view", "ss-step")
        self.pins = tuple(pins)
        if plan is not None:
            self.show(plan)

    @property
    def pins(self) -> tuple[ss.Plan, ...]:
        """The pinned plans: additional rows of the chart and columns of the tables."""
        return self._pins.plans

    @pins.setter
    def pins(self, plans: Sequence[ss.Plan]) -> None:
        self._pins.plans = tuple(plans)

    @property
    def report(self) -> StepReport | None:
        """The current prediction, or None."""
        return self.shown.report if self.shown else None

    def show(self, plan: ss.Plan, report: StepReport | None = None) -> None:
        """Draw a plan's step, or why it cannot be predicted. ``report`` is its prediction, if known."""
        self._check_shown(plan, ss.Plan)
        with self._lock:
            self.calibrate.show_for_plan(plan)
            self._pins.set_plan(plan)
            measured = next((step for known, step in self._measured if known == plan), None)
            self.shown = build_shown_step(plan, measured, self.pins)
            if report is not None:
                self.shown = self.shown._replace(step=self.shown.step._replace(report=report))
            draw_step(self.figure, self.shown)
            is_shown = self.calibrate.layout.display != "none"
            self.caption.value = write_caption(self.shown, CALIBRATE_LABEL if is_shown else "")
            self.figures.value = render_rate_table(self.shown)
            self.table.value = render_part_rows(self.shown)
            self._show_budget()

    def _redraw(self) -> None:
        if self.shown is not None:
            self.show(self.shown.plan)

    def add(self, plan: ss.Plan, measured: RunSteps) -> None:
        """Store the measured steps of a run of ``plan``; they are shown whenever that plan is."""
        with self._lock:
            remaining = [(known, step) for known, step in self._measured if known != plan]
            # The latest run of a plan replaces the earlier one.
            self._measured = [*remaining, (plan, measured)][-MAX_REMEMBERED:]
            if self.shown is not None and self.shown.plan == plan:
                self.show(plan)

    def _show_calibration(self) -> None:
        with self._lock:
            if self.shown is not None:
                self.show(self.shown.plan)
        self._on_calibrate()

    def _show_budget(self, change: object = None) -> None:
        """Show days and price for the tokens that the user typed; an error is shown at the input."""
        report = self.report
        self.budget_row.show(report is not None)
        self.budget_row.show_error("")
        if report is None or self.shown is None:
            return
        # No duration and price for a plan that cannot run.
        if self.shown.step.lacks:
            hint = escape(self.shown.step.lacks, quote=True)
            self.budget_words.value = f"<span title='{hint}'>– <span class='ss-hint'>{hint}</span></span>"
            return
        try:
            num_tokens = parse_tokens(self.budget.value)
        except ValueError as error:
            self.budget_row.show_error(str(error))
            self.budget_words.value = ""
            return
        steps = num_tokens / report.num_tokens
        parts = [f"<b>{escape(format_duration(report.days(num_tokens)))}</b> without failures"]
        cost = report.cost(num_tokens)
        if cost is not None:
            parts.append(f"<b>{format_dollars(cost)}</b>")
        parts.append(f"{format_short(steps)} steps")
        self.budget_words.value = " · ".join(parts)
