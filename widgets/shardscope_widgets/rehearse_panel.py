"""The button that plays a plan with its framework's own code, how far that is, and the way to stop it."""

from __future__ import annotations

from collections.abc import Callable

import shardscope as ss
from shardscope.memory.report import MemoryReport
from shardscope_widgets.work_panel import Progress, WorkPanel

TIMEOUT_SECONDS = 600.0


class RehearsePanel(WorkPanel):
    """Rehearses one plan at a time in the background; ``on_report`` gets the plan and its report."""

    def __init__(self, on_report: Callable[[ss.Plan, MemoryReport], None]) -> None:
        self._on_report = on_report
        self._plan: ss.Plan | None = None
        super().__init__(
            "Rehearse on fake tensors",
            "Run the framework's own code at true sizes: no GPU and no memory are needed",
            self._rehearse,
        )
        # A Plan that cannot be rehearsed has no such method: then there is nothing to offer.
        self.layout.display = "" if hasattr(ss.Plan, "rehearse") else "none"

    def offer(self, plan: ss.Plan) -> None:
        """Say what pressing the button would rehearse."""
        if plan != self._plan and not self.is_busy:
            self.words.value = ""
        self._plan = plan

    def _rehearse(self) -> None:
        plan = self._plan
        if plan is None:
            return

        def work(progress: Progress) -> MemoryReport:
            return plan.rehearse(progress=progress, timeout=TIMEOUT_SECONDS)

        self.start(
            work,
            lambda report: self._on_report(plan, report),
            lambda _, seconds: f"rehearsed in {seconds:.0f} s",
        )
