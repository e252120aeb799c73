"""Pipeline schedules, and the bubble of a stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

Schedule = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2"]
NAMES: dict[Schedule, str] = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "interleaved 1F1B",
    "zb-h1": "zero-bubble ZB-H1",
    "zb-h2": "zero-bubble ZB-H2",
}


def find_schedule(plan: Plan) -> Schedule | None:
    """Return the schedule that the plan's framework runs; None for a single stage."""
    if plan.degrees.pp == 1:
        return None
    if plan.layout.runs_all_forwards_first:
        return "gpipe"
    return "interleaved" if plan.degrees.vpp > 1 else "1f1b"


def compute_bubble_seconds(all_stages: float, slowest: float, vpp: int, micro_batches: int) -> float:
    """Return the slowest stage's bubble: one micro-batch's forward and backward on all other stages.

    Arguments are seconds of all micro-batches of a step. For equal stages, this is (pp - 1) / (vpp x
    micro-batches) of one stage's own time (Narayanan et al. 2021, section 2.2), with 1F1B as with GPipe;
    interleaved, a micro-batch waits for 1/vpp of each.
    """
    return (all_stages - slowest) / (vpp * micro_batches)
