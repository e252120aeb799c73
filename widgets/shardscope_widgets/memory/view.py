"""The memory view: bars of every tier and pinned plan, the timeline of one step, and a detailed table."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from html import escape

import ipywidgets as widgets

import shardscope as ss
from shardscope.memory.report import MemoryReport
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.clickable import Clickable
from shardscope_widgets.kit.pins import Pins
from shardscope_widgets.kit.sheet import Sheet
from shardscope_widgets.kit.view import View
from shardscope_widgets.memory.figure import create_memory_figure, draw_memory
from shardscope_widgets.memory.fit_search import FitSearch
from shardscope_widgets.memory.rehearsal import RehearsePanel
from shardscope_widgets.memory.repairs import OnFit, RepairsPanel, name_plan_changes
from shardscope_widgets.memory.rows import ShownMemory, pin_plans
from shardscope_widgets.memory.table import render_component_table, write_caption

MAX_REMEMBERED = 32
"""Maximum stored reports of rehearsals and runs, which are shown again with their plan."""
MODES = [("At the peak", "peak"), ("Over one step", "step")]
STAGES = ("By stage", "stages")


class MemoryView(View):
    """A plan's memory in every tier, redrawn in place when :meth:`show` receives another plan.

    ``on_pin`` receives the plan whose pin button was pressed and sets :attr:`pins`; None: the view stores its
    own pins. ``on_apply`` receives a plan that needs less memory; None: the view shows that plan itself, says
    what is changed, and has a button that shows the plan of :meth:`show` again.
    ``on_fit`` receives a plan that does not fit and its fit; None: the fit goes to ``on_apply``.
    ``fit_search`` finds the fit.
    """

    def __init__(
        self,
        plan: ss.Plan | None = None,
        *,
        pins: Sequence[ss.Plan] = (),
        on_pin: Callable[[ss.Plan], None] | None = None,
        on_apply: Callable[[ss.Plan], None] | None = None,
        on_fit: OnFit | None = None,
        fit_search: FitSearch | None = None,
    ) -> None:
        self.report: MemoryReport | None = None
        self.plan: ss.Plan | None = None
        self._plan_before_changes: ss.Plan | None = None
        self._remembered: list[tuple[ss.Plan, MemoryReport]] = []
        # A rehearsal or a run ends in its own thread while the user may change an input: the lock ensures
        # that the last drawing shows the current state.
        self._lock = threading.RLock()
        self._pins = Pins(self._redraw, on_pin)
        self.mode = controls.create_segments(MODES, "Memory")
        self.mode.observe(self._redraw, "value")
        self.rehearse = RehearsePanel(on_report=self.add)
        buttons = [self.rehearse, self._pins.button]
        # Only for a view that applies changes itself: a Studio has its inputs.
        self.undo: widgets.Button | None = None
        if on_apply is None:
            hidden = widgets.Layout(display="none")
            self.undo = controls.create_button("Undo change", "ss-ghost", "ss-small", layout=hidden)
            self.undo.on_click(lambda _: self._undo_changes())
            buttons.insert(0, self.undo)
        actions = widgets.HBox(buttons, layout=controls.share_layout())
        actions.add_class("ss-actions")
        bar = widgets.HBox([self.mode, actions], layout=controls.share_layout())
        bar.add_class("ss-toolbar")
        self.table = Clickable(self._pins.press_button)
        self.figure = create_memory_figure(self.table.open_row)
        self.caption = controls.create_html("", "ss-hint", layout=widgets.Layout())
        # Progress replaces the caption while there is any, so that the content below does not move.
        line = widgets.Box([self.caption, self.rehearse.status], layout=controls.share_layout())
        line.add_class("ss-caption")
        self.rehearse.button.observe(self._show_progress, "disabled")
        self.repairs = RepairsPanel(on_apply or self._apply_change, on_fit, fit_search)
        super().__init__([Sheet("memory"), bar, self.figure, line, self.table, self.repairs])
        self.add_class("ss-root")
        self.add_class("ss-memory")
        self.pins = tuple(pins)
        if plan is not None:
            self.show(plan)

    @property
    def pins(self) -> tuple[ss.Plan, ...]:
        """The pinned plans: additional rows of the chart and columns of the table."""
        return self._pins.plans

    @pins.setter
    def pins(self, plans: Sequence[ss.Plan]) -> None:
        self._pins.plans = tuple(plans)

    def show(self, plan: ss.Plan, report: MemoryReport | None = None) -> None:
        """Draw a plan's memory; ``report`` is its prediction, if already computed."""
        self._check_shown(plan, ss.Plan)
        self._show(plan, report or plan.memory(), None)

    def _show(self, plan: ss.Plan, report: MemoryReport, before_changes: ss.Plan | None) -> None:
        with self._lock:
            self.plan, self.report, self._plan_before_changes = plan, report, before_changes
            self._pins.set_plan(plan)
            self.rehearse.set_plan(plan)
            self._offer_modes(len(report.by_stage) > 1)
            self._redraw()
        self.repairs.show_repairs_later(plan, report)

    def _apply_change(self, plan: ss.Plan) -> None:
        """Draw ``plan``, a change of the one that is shown."""
        before = self._plan_before_changes or self.plan
        self._show(plan, plan.memory(), None if plan == before else before)

    def _undo_changes(self) -> None:
        if self._plan_before_changes is not None:
            self.show(self._plan_before_changes)

    def add(self, plan: ss.Plan, report: MemoryReport) -> None:
        """Store a rehearsed or measured report; it is shown whenever its plan is."""
        with self._lock:
            remaining = [
                (known, old)
                for known, old in self._remembered
                if not (known == plan and old.tier == report.tier)
            ]
            self._remembered = [*remaining, (plan, report)][-MAX_REMEMBERED:]
            self._redraw()

    @property
    def shown(self) -> ShownMemory | None:
        """The current plan, its reports by tier, and the pinned plans."""
        plan = self.plan
        if plan is None or self.report is None:
            return None
        known: dict[str, MemoryReport] = {
            report.tier: report for other, report in self._remembered if other == plan
        }
        return ShownMemory(plan, {"predicted": self.report, **known}, pin_plans(self.pins, plan))

    def _offer_modes(self, has_stages: bool) -> None:
        modes = [*MODES, STAGES] if has_stages else MODES
        if len(self.mode.options) != len(modes):
            chosen = self.mode.value
            # Setting options selects the first one, so the mode is set again.
            self.mode.options = modes
            self.mode.tooltips = [f"Memory: {label}" for label, _ in modes]
            self.mode.value = chosen if chosen in dict(modes).values() else "peak"

    def _show_progress(self, change: object) -> None:
        self.caption.layout.display = "none" if self.rehearse.is_busy else ""

    def _redraw(self, change: object = None) -> None:
        with self._lock:
            shown = self.shown
            if shown is None:
                return
            draw_memory(self.figure, shown, self.mode.value)
            caption, before = write_caption(shown, self.mode.value), self._plan_before_changes
            if before is not None:
                caption = f"<b>with {escape(name_plan_changes(before, shown.plan))}</b> · {caption}"
            self.caption.value = caption
            if self.undo is not None:
                self.undo.layout.display = "" if before is not None else "none"
            self.table.value = render_component_table(shown)
