"""Rows of the time view: a plan's predicted step (or why there is none), measured and pinned steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import shardscope as ss
from shardscope.core.errors import FieldError
from shardscope.core.number_format import Scale
from shardscope.planner.verdict import assess_plan
from shardscope.records.folder import RunFolder
from shardscope.runs.explain.measured_step import read_latest_records
from shardscope.timing.calibration.finished_runs import compute_median_step, find_residual
from shardscope.timing.report import StepReport
from shardscope_widgets.kit.display_names import name_missing_input
from shardscope_widgets.kit.pins import PinName, name_pins


class RunSteps(NamedTuple):
    """The measured steps of one run."""

    num_steps: int
    """Number of steps in the median, without the slower first steps of a run."""
    seconds: float
    """The median step."""

    @classmethod
    def from_run(cls, run: ss.Run) -> RunSteps | None:
        """Return the last steps that ``run`` logged; None if there are too few."""
        median = compute_median_step(read_latest_records(RunFolder(run.folder), run.world_size))
        return None if median is None else cls(*median)


CALIBRATE = "ss.calibrate()"
"""The fix of an error about rates that a measurement would give."""


class PlanStep(NamedTuple):
    """The predicted step of one plan."""

    report: StepReport | None
    """The prediction; None if there is none, with the reason in :attr:`refusal`."""
    refusal: str = ""
    lacks: str = ""
    """Why the plan does not fit; empty if it does. A plan that does not fit has no tokens/s and no price."""

    is_uncalibrated: bool = False
    """Whether a measurement of the machine would give a prediction."""

    @classmethod
    def from_plan(cls, plan: ss.Plan) -> PlanStep:
        """Predict the step of ``plan``; store the message of an error."""
        # Assessed first: the step of a plan that does not fit is still predicted, for its chart.
        verdict = assess_plan(plan)
        lacks = (
            f"Does not fit: {verdict.reason[:1].lower()}{verdict.reason[1:]}"
            if verdict.state == "does not fit"
            else ""
        )
        try:
            return cls(plan.step(), lacks=lacks)
        except FieldError as error:
            if named := name_missing_input(error):
                return cls(None, f"{named[:1].upper()}{named[1:]}.", lacks)
            # The full message names fields of the Python API, as does the fix of missing rates.
            is_uncalibrated = error.fix == CALIBRATE
            fix = "" if is_uncalibrated else f" Fix: {error.fix}."
            short = f"{error.problem}.{fix}" if error.problem else str(error)
            return cls(None, short, lacks, is_uncalibrated)
        except ValueError as error:
            return cls(None, str(error), lacks)

    @property
    def why_no_rates(self) -> str:
        """The reason why there are no rates and prices; empty if there are."""
        return self.lacks or self.refusal


class PinStep(NamedTuple):
    """A pinned plan, compared with the current plan."""

    name: PinName
    step: PlanStep


class ShownStep(NamedTuple):
    """One plan's step, predicted and measured, and the pinned plans."""

    plan: ss.Plan
    step: PlanStep
    measured: RunSteps | None = None
    pins: tuple[PinStep, ...] = ()

    @property
    def report(self) -> StepReport | None:
        """The prediction, or None."""
        return self.step.report

    @property
    def refusal(self) -> str:
        """The reason why there is no prediction."""
        return self.step.refusal

    @property
    def scale(self) -> Scale:
        """The common unit of all times in the view."""
        # The longest one decides: in its unit the others are short numbers, in theirs it would be a long one.
        known = [self.report.seconds] if self.report else []
        known += [self.measured.seconds] if self.measured else []
        return Scale.for_seconds(max(known, default=1.0))


def build_shown_step(
    plan: ss.Plan, measured: RunSteps | None = None, pins: Sequence[ss.Plan] = ()
) -> ShownStep:
    """Return the step of ``plan``, its prediction and any ``measured`` steps, with those of the ``pins``."""
    names = name_pins(pins, plan)
    pinned = tuple(PinStep(name, PlanStep.from_plan(pin)) for name, pin in zip(names, pins, strict=True))
    return ShownStep(plan, PlanStep.from_plan(plan), measured, pinned)


def describe_residual(plan: ss.Plan) -> str:
    """Return the deviation of finished runs on this machine from such predictions; empty without runs."""
    try:
        # Raises for a damaged file of measurements: the caption reports it, and the prediction remains.
        deviation = find_residual(plan)
    except ValueError as error:
        return str(error)
    return "" if deviation is None else deviation.words
