"""Findings about the Studio's plan, its task and the earlier runs, computed once for each state."""

from __future__ import annotations

import shardscope as ss
from shardscope.planner.checks import Finding
from shardscope_widgets.pickers import TaskPicker


class CheckResults:
    """The findings. They take longer than a redraw, and both the Checks tab and its badge need them."""

    def __init__(self, task: TaskPicker) -> None:
        self._task_picker = task
        self._latest: tuple[ss.Plan, list[Finding]] | None = None
        self._earlier_runs: list[ss.Run] | None = None

    def find(self, plan: ss.Plan) -> list[Finding]:
        """Return the findings about ``plan``, the task of the inputs and the runs in this folder."""
        if self._latest is None or self._latest[0] is not plan:
            try:
                task = self._task_picker.build_task(plan)
            except ValueError:  # The error is shown at its input, and launching is disabled.
                task = None
            if self._earlier_runs is None:
                self._earlier_runs = list(ss.runs())
            self._latest = (plan, list(plan.findings(task, self._earlier_runs)))
        return self._latest[1]

    def discard(self) -> None:
        """Compute the findings again when they are next needed: the task has changed."""
        self._latest = None

    def discard_runs(self) -> None:
        """Read the runs in this folder again when they are next needed: one of them has ended."""
        self._earlier_runs = None
        self.discard()
