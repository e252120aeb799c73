"""Collectives that are exposed, although the framework could overlap them with computation."""

from __future__ import annotations

from collections.abc import Iterator

from shardscope.core.finding import Finding
from shardscope.frameworks.registry import frameworks
from shardscope.planner.checks.case import Case, fastest, variants
from shardscope.planner.checks.words import percent

WORTH = 0.005
"""Share of the step from which an option without cost is worth reporting."""


def overlap_off(case: Case) -> Iterator[Finding]:
    """Report options that overlap collectives and are off. A search keeps the framework's defaults for them,
    so that plans that it ranks may gain from this."""
    plan = case.plan
    options = frameworks[plan.layout.framework].habits().overlaps(plan)
    mended = fastest(variants(plan, [({}, options)])) if options else None
    if mended is None or case.gain(mended) < WORTH:
        return
    gain = case.gain(mended)
    said = ", ".join(f"{name}={value!r}" for name, value in options.items())
    yield Finding(
        name="collectives-not-overlapped",
        severity="hint",
        why=f"Each step waits for gradients and weights to travel, though {plan.layout.title} can send them "
        f"while it computes: it would be {percent(gain)} shorter.",
        number=100 * gain,
        change=said,
        plan=mended.plan,
    )
