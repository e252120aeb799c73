"""Measurements of an ended run, shown next to the prediction of its plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardscope_widgets.time.rows import RunSteps

if TYPE_CHECKING:
    import shardscope as ss
    from shardscope.runs.explain.measured import MeasuredMemory


class MeasuredRun(NamedTuple):
    """The measurements of one run."""

    plan: ss.Plan
    memory: MeasuredMemory
    steps: RunSteps | None
    """None if it measured no step."""


def read_measured_run(run: ss.Run) -> MeasuredRun | None:
    """Read the files of ``run``; None if its folder has no plan."""
    try:
        plan = run.plan
    except ValueError:
        return None
    return MeasuredRun(plan, run.memory(), RunSteps.from_run(run))
