"""Learning rate schedules: a warm-up, then a decay, by transformers' names."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

SchedulerType = Literal[
    "linear", "cosine", "cosine_with_min_lr", "constant", "constant_with_warmup", "inverse_sqrt"
]
SCHEDULER_TYPES: tuple[str, ...] = get_args(SchedulerType)
"""Values of transformers' ``lr_scheduler_type``. Not among them: those that take further arguments
(``polynomial``, ``cosine_with_restarts``, ``warmup_stable_decay``) or a metric."""
DEFAULT_SCHEDULE: SchedulerType = "cosine"
DEFAULT_WARMUP = 0.03
"""Share of all steps, as Stanford Alpaca's and QLoRA's (Dettmers et al. 2023, arXiv:2305.14314, table 9)."""
FINAL_FRACTION = 0.1
"""Share of the peak at which ``cosine_with_min_lr`` ends, as GPT-3's (arXiv:2005.14165, appendix B) and
Llama's (arXiv:2302.13971, section 2.3)."""
INVERSE_SQRT_TIMESCALE = 10_000
"""Timescale of ``inverse_sqrt`` without a warm-up (transformers 5.24, optimization.py)."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Learning rate by step.

    Equals transformers' ``get_scheduler`` after the warm-up. In it, each step has the rate that transformers
    gives the next one: theirs begins at 0, so that the first step changes nothing.
    """

    peak: float
    """Learning rate after the warm-up."""
    num_steps: int
    """Total number of steps, warm-up included."""
    warmup_steps: int
    """Number of steps in which the rate rises linearly to ``peak``."""
    kind: SchedulerType = DEFAULT_SCHEDULE

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of ``step`` (from 0)."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        return self.peak * _DECAYS[self.kind](self, step)

    def progress_at(self, step: int) -> float:
        """Return the share of the steps after the warm-up that is done before ``step``."""
        return (step - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps)

    def describe(self) -> dict[str, object]:
        """Return the schedule's numbers for the run folder, by the names of the task's fields."""
        return {
            "num_steps": self.num_steps,
            "learning_rate": self.peak,
            "schedule": self.kind,
            "warmup": self.warmup_steps,
        }


def count_warmup_steps(warmup: float, num_steps: int, kind: SchedulerType = DEFAULT_SCHEDULE) -> int:
    """Return the number of warm-up steps in ``num_steps``; "constant" has none.

    ``warmup`` below 1 is a share of them, rounded up as in transformers.
    """
    if kind == "constant":
        return 0
    return min(num_steps, int(warmup) if warmup >= 1 else math.ceil(num_steps * warmup))


# ---- Factors of the peak after the warm-up


def _keep(schedule: Schedule, step: int) -> float:
    return 1.0


def _decay_linearly(schedule: Schedule, step: int) -> float:
    return 1 - schedule.progress_at(step)


def _decay_to(final: float) -> Callable[[Schedule, int], float]:
    """Return a half cosine from 1 to ``final``."""

    def follow_cosine(schedule: Schedule, step: int) -> float:
        return final + (1 - final) * (1 + math.cos(math.pi * schedule.progress_at(step))) / 2

    return follow_cosine


def _decay_by_square_root(schedule: Schedule, step: int) -> float:
    timescale = schedule.warmup_steps or INVERSE_SQRT_TIMESCALE
    return 1 / math.sqrt((step + timescale - schedule.warmup_steps) / timescale)


_DECAYS: dict[SchedulerType, Callable[[Schedule, int], float]] = {
    "linear": _decay_linearly,
    "cosine": _decay_to(0.0),
    "cosine_with_min_lr": _decay_to(FINAL_FRACTION),
    "constant": _keep,
    "constant_with_warmup": _keep,
    "inverse_sqrt": _decay_by_square_root,
}
