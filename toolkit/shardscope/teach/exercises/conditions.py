"""Conditions of exercises whose answer is a plan: it fits, it is fast enough."""

from __future__ import annotations

from shardscope.core.number_format import format_gib
from shardscope.core.plan import Plan
from shardscope.planner.memory_needs import fits
from shardscope.teach.answers import Condition


def find_overflow(plan: Plan) -> str | None:
    """Return by how much the plan's peak exceeds the GPU, or None if the plan fits."""
    report = plan.memory()
    if not report.fits:
        # In GiB, as the charts of the same plan have it.
        return f"the peak is {format_gib(report.peak_bytes)} of {format_gib(report.usable_bytes)} GiB"
    return None if fits(plan, report) else "host memory is too small for what is offloaded"


FITS = Condition("the plan fits", find_overflow)


def require_speed(tokens_per_second: int) -> Condition:
    """Return the condition that each GPU trains at least so many tokens a second."""

    def find_problem(plan: Plan) -> str | None:
        speed = plan.step().tokens_per_second_per_gpu
        return None if speed >= tokens_per_second else f"it has {speed:,.0f}"

    return Condition(f"at least {tokens_per_second:,} tokens/s per GPU", find_problem)
