"""What the step view shows: a plan's predicted step, or why there is none, and steps that were measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import shardscope as ss
from shardscope.timing.report import StepReport
from shardscope_widgets.number_words import Scale

WARM_UP_STEPS = 2
"""Steps at the start of a run that are no example of the others: compilers, allocators and caches warm up."""


class MeasuredStep(NamedTuple):
    """The steps of one run, as its rank 0 logged them."""

    seconds: float
    """The median step."""
    num_steps: int
    """How many that is the median of."""

    @classmethod
    def of(cls, metrics: Sequence[Mapping[str, Any]]) -> MeasuredStep | None:
        """From ``run.metrics()``; None where no steady step was logged."""
        logged = [
            record["step_seconds"]
            for record in metrics
            if record.get("rank") == 0 and isinstance(record.get("step_seconds"), int | float)
        ]
        steady = logged[WARM_UP_STEPS:]
        return cls(statistics.median(steady), len(steady)) if steady else None


class ShownStep(NamedTuple):
    """One plan's step in every tier that there is."""

    plan: ss.Plan
    report: StepReport | None
    """The prediction; None: there is none, and :attr:`refusal` says why."""
    refusal: str = ""
    measured: MeasuredStep | None = None

    @property
    def scale(self) -> Scale:
        """The unit of every time that is shown."""
        known = [self.report.seconds] if self.report else []
        known += [self.measured.seconds] if self.measured else []
        return Scale.of(max(known, default=1.0))


def shown_step(plan: ss.Plan, measured: MeasuredStep | None = None) -> ShownStep:
    """Ask ``plan`` for its step; what it refuses to tell becomes words."""
    try:
        return ShownStep(plan, plan.step(), measured=measured)
    except ValueError as error:
        return ShownStep(plan, None, str(error), measured)
