"""The button that plays a plan with its framework's own code, how far that is, and the way to stop it."""

from __future__ import annotations

from collections.abc import Callable

import shardscope as ss
from shardscope.memory.report import MemoryReport
from shardscope.rehearsal.extent import expected_seconds
from shardscope_widgets.kit.background_work import Progress, WorkPanel, about

TIMEOUT_SECONDS = 600.0


class RehearsePanel(WorkPanel):
    """Rehearses one plan at a time in the background; ``on_report`` gets the plan and its report."""

    def __init__(self, on_report: Callable[[ss.Plan, MemoryReport], None]) -> None:
        self._on_report = on_report
        self._plan: ss.Plan | None = None
        self._pace = 1.0
        """What the last rehearsal took here, of what was expected of it."""
        super().__init__(
            "Rehearse on fake tensors",
            "Run the framework's own code at true sizes: no GPU and no memory are needed",
            self._rehearse,
        )
        # A Plan that cannot be rehearsed has no such method: then there is nothing to offer.
        self.layout.display = "" if hasattr(ss.Plan, "rehearse") else "none"

    def offer(self, plan: ss.Plan) -> None:
        """Say what pressing the button would rehearse."""
        changed, self._plan = plan != self._plan, plan
        if changed and not self.is_busy:
            self.say(f"A rehearsal takes {about(self._expected(plan))} on an idle machine.")

    def _expected(self, plan: ss.Plan) -> float:
        return expected_seconds(plan) * self._pace

    def _rehearse(self) -> None:
        plan = self._plan
        if plan is None:
            return

        def work(progress: Progress) -> MemoryReport:
            return plan.rehearse(progress=progress, timeout=TIMEOUT_SECONDS)

        def done(_: MemoryReport, seconds: float) -> str:
            self._pace = seconds / expected_seconds(plan)
            return f"rehearsed in {seconds:.0f} s"

        self.start(work, lambda report: self._on_report(plan, report), done, self._expected(plan))
