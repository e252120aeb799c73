"""The button that checks a plan's memory with the framework's own code, its progress and Stop button."""

from __future__ import annotations

from collections.abc import Callable

import ipywidgets as widgets

import shardscope as ss
from shardscope.memory.report import MemoryReport
from shardscope.rehearsal.extent import estimate_seconds
from shardscope_widgets.kit.background_work import Progress, WorkPanel, describe_duration

TIMEOUT_SECONDS = 600.0
LABEL, LABEL_ON_CPU = "Check memory without GPUs", "Check memory without a run"
"""Label of the button for a plan of GPUs, and of CPU ranks."""


class RehearsePanel(WorkPanel):
    """A button that rehearses one plan at a time; ``on_report`` receives the plan and its report.

    The panel itself is the button; :attr:`status` has the progress and the text, which the view places in an
    existing line.
    """

    def __init__(self, on_report: Callable[[ss.Plan, MemoryReport], None]) -> None:
        self._on_report = on_report
        self._plan: ss.Plan | None = None
        self._pace = 1.0
        """Ratio of the last rehearsal's duration to its expected duration."""
        super().__init__(LABEL, "", self._start_rehearsal)
        # Progress and text are part of the caption's line instead (status).
        self.children = [self.button]
        self.status = widgets.HBox([self.progress, self.words, self.cancel], layout=widgets.Layout())
        self.status.add_class("ss-status-line")
        # ss.Plan has no such method if the rehearsal's dependencies are not installed.
        self.layout.display = "" if hasattr(ss.Plan, "rehearse") else "none"

    def set_plan(self, plan: ss.Plan) -> None:
        """Set the plan to check, and show the expected duration in the tooltip."""
        changed, self._plan = plan != self._plan, plan
        self.button.description = LABEL if plan.on_gpu else LABEL_ON_CPU
        without = "GPUs and without the memory" if plan.on_gpu else "the memory"
        self.button.tooltip = (
            f"Run the framework's own code on fake tensors, without {without}: "
            f"{describe_duration(self._estimate_seconds(plan))} on an idle machine"
        )
        if changed and not self.is_busy:
            self.words.value = ""

    def _estimate_seconds(self, plan: ss.Plan) -> float:
        return estimate_seconds(plan) * self._pace

    def _start_rehearsal(self) -> None:
        plan = self._plan
        if plan is None:
            return

        def rehearse(progress: Progress) -> MemoryReport:
            return plan.rehearse(progress=progress, timeout=TIMEOUT_SECONDS)

        def describe_result(_: MemoryReport, seconds: float) -> str:
            self._pace = seconds / estimate_seconds(plan)
            return ""  # The new row of the chart shows the result.

        self.start(
            rehearse,
            lambda report: self._on_report(plan, report),
            describe_result,
            self._estimate_seconds(plan),
        )
