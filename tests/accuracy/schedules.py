"""Rows of pipeline schedules that no engine of ours runs, whose bubble ``plan.step()`` tells all the same."""

from __future__ import annotations

import re
from dataclasses import replace
from types import MappingProxyType

from tests.accuracy.rows import Row, join_fields

import shardscope as ss
from shardscope.prediction.pipeline import compute_bubbles
from shardscope.timing.pipeline import Schedule
from shardscope.timing.report import StepReport

_ZERO_BUBBLE: tuple[tuple[str, Schedule, tuple[str, ...]], ...] = (
    (r"\bzb-?h1\b", "zb-h1", ()),
    (r"\bzb-?h2\b", "zb-h2", ()),
    (r"\bzb-?1p\b", "zb-h1", ("schedule ZB-1p, found by a search with ZB-H1's memory: predicted as ZB-H1",)),
    (r"\bzb-?2p\b", "zb-h2", ("schedule ZB-2p, found by a search with ZB-H2's memory: predicted as ZB-H2",)),
)
"""Qi et al. 2023 (arXiv:2401.10241), sections 2 and 4: p and 2 p micro-batches' activations at most."""


def with_schedule(row: Row) -> tuple[Row, Schedule | None, tuple[str, ...]]:
    """The row as one of 1F1B, the zero-bubble schedule that it ran, if any, and what was assumed about it."""
    words = join_fields(row, "framework")
    for pattern, schedule, assumed in _ZERO_BUBBLE:
        plain = re.sub(pattern, "1f1b", words)
        if plain != words:
            return {**row, "framework": plain}, schedule, assumed
    return row, None, ()


def apply_schedule(schedule: Schedule | None, plan: ss.Plan, report: StepReport) -> StepReport:
    """Return the step of ``plan`` with the bubble of ``schedule``; None is the plan's own schedule."""
    if schedule is None:
        return report
    return replace(
        report, parts=MappingProxyType({**report.parts, "bubble": compute_bubbles(plan)[schedule]})
    )
