"""What the step view shows: a plan's predicted step, or why there is none, and steps that were measured."""

from __future__ import annotations

from typing import NamedTuple

import shardscope as ss
from shardscope.runs.folder import RunFolder
from shardscope.runs.measured_step import latest_lines
from shardscope.timing.calibration_runs import median_step, residual
from shardscope.timing.report import StepReport
from shardscope_widgets.kit.numbers import Scale


class RunSteps(NamedTuple):
    """The steps of one run."""

    num_steps: int
    """How many the median is of: without the first, which are no example of the others."""
    seconds: float
    """The median step."""

    @classmethod
    def of(cls, run: ss.Run) -> RunSteps | None:
        """Of what ``run`` logged last; None where that is too little."""
        found = median_step(latest_lines(RunFolder(run.folder), run.world_size))
        return None if found is None else cls(*found)


class ShownStep(NamedTuple):
    """One plan's step in every tier that there is."""

    plan: ss.Plan
    report: StepReport | None
    """The prediction; None: there is none, and :attr:`refusal` says why."""
    refusal: str = ""
    measured: RunSteps | None = None

    @property
    def scale(self) -> Scale:
        """The unit of every time that is shown."""
        known = [self.report.seconds] if self.report else []
        known += [self.measured.seconds] if self.measured else []
        return Scale.of(max(known, default=1.0))


def shown_step(plan: ss.Plan, measured: RunSteps | None = None) -> ShownStep:
    """Ask ``plan`` for its step; what it refuses to tell becomes words."""
    try:
        return ShownStep(plan, plan.step(), measured=measured)
    except ValueError as error:
        return ShownStep(plan, None, str(error), measured)


def residual_words(plan: ss.Plan) -> str:
    """How far finished runs of this machine were from such predictions; empty where there are none."""
    try:
        found = residual(plan)
    except ValueError as damaged:
        return str(damaged)
    return "" if found is None else found.words
