"""Measured step times of finished runs, stored with their machine's calibration.

They never correct a prediction: its report shows the ratio of measured to predicted time of such runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.errors import Value, check_integer, check_number, refuse
from shardscope.core.serialization import Serializable

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

MAX_RUNS = 64
"""Maximum number of measured steps stored per machine and GPU type; the oldest is dropped."""
SKIPPED_STEPS = 3
"""Number of skipped first steps of a run: they allocate memory that later ones reuse."""
MIN_STEPS = 5
"""Minimum number of remaining steps for a median."""


@dataclass(frozen=True, kw_only=True)
class MeasuredStep(Serializable):
    """One finished run: its plan, its measured and its predicted step time."""

    run: str
    """Name of the run."""
    finished_at: str
    """End time: ISO 8601, with the offset from UTC."""
    plan: Mapping[str, object]
    """The plan as ``Plan.to_dict``."""
    num_steps: int
    """Number of steps in the median."""
    seconds: float
    """Median seconds per step, over all steps of all ranks."""
    predicted_seconds: float | None
    """Result of ``plan.step()`` at launch; None if it failed."""
    predicted_from: str | None
    """Source of the prediction's constants."""
    load: float = 0.0
    """Runnable processes per core in the run's last minute, its own ranks excluded."""

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
        check_integer("MeasuredStep.num_steps", self.num_steps, low=1, high=10**9)
        check_number("MeasuredStep.seconds", self.seconds, low=1e-9, high=1e7)
        if self.predicted_seconds is not None:
            check_number("MeasuredStep.predicted_seconds", self.predicted_seconds, low=1e-9, high=1e7)
        check_number("MeasuredStep.load", self.load, low=0.0, high=1e6)
        if self.predicted_from is not None and not isinstance(self.predicted_from, str):
            refuse("MeasuredStep.predicted_from", self.predicted_from, "text or None", Value(None))

    @property
    def framework(self) -> object:
        """Framework of the plan's layout."""
        layout = self.plan["layout"]
        return layout.get("framework") if isinstance(layout, Mapping) else None

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None without a prediction."""
        return None if self.predicted_seconds is None else self.seconds / self.predicted_seconds


class Residual(NamedTuple):
    """Ratios of measured to predicted step time for one architecture and framework on one machine."""

    num_runs: int
    median: float
    """Median of measured over predicted."""
    low: float
    high: float
    num_busy: int = 0
    """Number of runs during which other processes kept the machine busy."""

    @property
    def words(self) -> str:
        """Text for the user."""
        runs = "one finished run" if self.num_runs == 1 else f"{self.num_runs} finished runs"
        alone = self.num_runs == 1
        then = "the machine was busy then" if alone else f"{self.num_busy} of them while it was busy"
        busy = f"; {then}" if self.num_busy else ""
        spread = "" if self.num_runs == 1 else f" (median; {self.low:.2f} to {self.high:.2f})"
        return (
            f"{runs} of this architecture with this framework on this machine took {self.median:.2f} times "
            f"the predicted step{spread}{busy}; the prediction is not corrected by that"
        )


def find_residual(plan: Plan) -> Residual | None:
    """Return the residual of this machine's finished runs with comparable predictions; None without any.

    Counted are runs of the same architecture and framework on this machine's GPUs of the same type, predicted
    from the same constants as ``plan`` would be now. Raises ``ValueError`` for a damaged stored file.
    """
    from shardscope.timing.calibration.curves import BUSY_LOAD
    from shardscope.timing.calibration.selection import select_rates
    from shardscope.timing.calibration.store import read_stored_record

    record = read_stored_record(plan.cluster.gpu.name)
    if record is None or not record.steps:
        return None
    # A comparable prediction has the same model, framework and constants; sizes and degrees may differ.
    shape = plan.architecture.to_dict()
    framework, source = plan.layout.framework, select_rates(plan.cluster).source
    counted = [
        (one.ratio, one.load > BUSY_LOAD)
        for one in record.steps
        if one.ratio is not None
        and one.predicted_from == source
        and one.framework == framework
        and one.plan["architecture"] == shape
    ]
    if not counted:
        return None
    ratios = [ratio for ratio, _ in counted]
    num_busy = sum(busy for _, busy in counted)
    return Residual(len(ratios), median(ratios), min(ratios), max(ratios), num_busy)


def compute_median_step(metrics: Iterable[Mapping[str, object]]) -> tuple[int, float] | None:
    """Return (number of steps, median seconds) of a run's logged metrics; None if there are too few steps.

    Steps are synchronous, so the ranks' times differ only by waiting: all of them count.
    """
    seconds: dict[int, list[float]] = {}
    for line in metrics:
        step, took = line.get("step"), line.get("step_seconds")
        # A task may log anything under these names; ``MeasuredStep`` rejects seconds of 1e7 and more.
        if isinstance(step, int) and isinstance(took, int | float) and 0 < took < 1e7:
            seconds.setdefault(step, []).append(float(took))
    counted_steps = sorted(seconds)[SKIPPED_STEPS:]
    if len(counted_steps) < MIN_STEPS:
        return None
    return len(counted_steps), median(took for step in counted_steps for took in seconds[step])
