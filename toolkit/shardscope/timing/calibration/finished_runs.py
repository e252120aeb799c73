"""What finished runs really took for a step, kept beside the calibration of their machine.

A prediction is never corrected by them: its report says how far such runs were from theirs, as a ratio.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from shardscope.core.errors import Value, real_number, refuse, whole_number
from shardscope.core.serialization import JsonNoun

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

MAX_RUNS = 64
"""Measured steps that are kept for one machine and GPU type; an older one gives way."""
SKIPPED_STEPS = 3
"""Of a run, its first: they allocate what later ones reuse."""
MIN_STEPS = 5
"""Steps that must be left for a median to be kept."""


@dataclass(frozen=True, kw_only=True)
class MeasuredStep(JsonNoun):
    """One finished run: its plan, what its steps took, what was predicted."""

    run: str
    """The run's name."""
    finished_at: str
    """ISO 8601, with its offset from UTC."""
    plan: Mapping[str, Any]
    """What ``Plan.to_dict`` gives."""
    num_steps: int
    """Steps that the median is of."""
    seconds: float
    """Median seconds of one step, all ranks' steps together."""
    predicted_seconds: float | None
    """What ``plan.step()`` said when the run was launched; None where it could not."""
    predicted_from: str | None
    """Which constants that came from."""
    load: float = 0.0
    """Runnable processes for each core in its last minute, its own ranks apart."""

    def __post_init__(self) -> None:
        for name in ("run", "finished_at"):
            value = getattr(self, name)
            if not isinstance(value, str) or not 1 <= len(value) <= 200:
                refuse(f"MeasuredStep.{name}", value, "1 to 200 characters", "ss.calibrate()")
        nouns = ("architecture", "cluster", "recipe", "layout")
        if not isinstance(self.plan, Mapping) or not all(
            isinstance(self.plan.get(n), Mapping) for n in nouns
        ):
            refuse("MeasuredStep.plan", self.plan, "what Plan.to_dict gives", "plan.to_dict()")
        whole_number("MeasuredStep.num_steps", self.num_steps, low=1, high=10**9)
        real_number("MeasuredStep.seconds", self.seconds, low=1e-9, high=1e7)
        if self.predicted_seconds is not None:
            real_number("MeasuredStep.predicted_seconds", self.predicted_seconds, low=1e-9, high=1e7)
        real_number("MeasuredStep.load", self.load, low=0.0, high=1e6)
        if self.predicted_from is not None and not isinstance(self.predicted_from, str):
            refuse("MeasuredStep.predicted_from", self.predicted_from, "text or None", Value(None))

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None where nothing was predicted."""
        return None if self.predicted_seconds is None else self.seconds / self.predicted_seconds


class Residual(NamedTuple):
    """How far runs of one architecture and framework on one machine were from their predictions."""

    num_runs: int
    median: float
    """Measured over predicted."""
    low: float
    high: float
    num_busy: int = 0
    """Runs beside which others kept the machine busy."""

    @property
    def words(self) -> str:
        """For people."""
        runs = "one finished run" if self.num_runs == 1 else f"{self.num_runs} finished runs"
        alone = self.num_runs == 1
        then = "the machine was busy then" if alone else f"{self.num_busy} of them while it was busy"
        busy = f"; {then}" if self.num_busy else ""
        spread = "" if self.num_runs == 1 else f" (median; {self.low:.2f} to {self.high:.2f})"
        return (
            f"{runs} of this architecture with this framework on this machine took {self.median:.2f} times "
            f"the predicted step{spread}{busy}; the prediction is not corrected by that"
        )


def residual(plan: Plan) -> Residual | None:
    """What finished runs of this machine say of predictions like that of ``plan``; None where there are none.

    Counted are runs of the same architecture and framework on such GPUs of this machine, predicted from the
    same constants as ``plan`` would be now. Raises ``ValueError`` for a stored file that is damaged.
    """
    from shardscope.timing.calibration.curves import BUSY_LOAD, rates_for
    from shardscope.timing.calibration.store import data_folder, file_for, stored

    record = stored(file_for(plan.cluster.gpu.name, data_folder()))
    if record is None or not record.steps:
        return None
    shape = plan.architecture.to_dict()
    framework, source = plan.layout.framework, rates_for(plan.cluster).source
    counted = [
        (one.ratio, one.load > BUSY_LOAD)
        for one in record.steps
        if one.ratio is not None
        and one.predicted_from == source
        and one.plan["layout"].get("framework") == framework
        and one.plan["architecture"] == shape
    ]
    if not counted:
        return None
    ratios = [ratio for ratio, _ in counted]
    num_busy = sum(busy for _, busy in counted)
    return Residual(len(ratios), median(ratios), min(ratios), max(ratios), num_busy)


def median_step(metrics: Iterable[Mapping[str, Any]]) -> tuple[int, float] | None:
    """(steps, median seconds) of a run's metrics as ranks logged them; None where there are too few.

    Steps are synchronous, so that the ranks' own times differ by waiting only: all of them count.
    """
    seconds: dict[int, list[float]] = {}
    for line in metrics:
        step, took = line.get("step"), line.get("step_seconds")
        if isinstance(step, int) and isinstance(took, int | float) and 0 < took < 1e7:
            seconds.setdefault(step, []).append(float(took))
    kept = sorted(seconds)[SKIPPED_STEPS:]
    if len(kept) < MIN_STEPS:
        return None
    return len(kept), median(each for step in kept for each in seconds[step])
