"""Checks of recomputation: off although memory is short, on although activations would fit."""

from __future__ import annotations

from collections.abc import Iterator

from shardscope.core.finding import Finding
from shardscope.core.number_format import format_gib
from shardscope.planner.checks.case import NOTICEABLE, Case, Variant, evaluate_variants, find_fastest
from shardscope.planner.checks.number_format import format_percent
from shardscope.prediction.support import list_supported
from shardscope.timing.report import format_seconds

WORDS = {"none": "no recomputation", "selective": "selective recomputation", "full": "full recomputation"}


def find_recomputation(case: Case) -> Variant | None:
    """Return the best recomputation with which a plan fits that does not fit otherwise; None if there is none
    or no need."""
    # Only for plans that are known not to fit: None means that there are no formulas.
    if case.plan.recipe.recompute != "none" or case.has_room is not False:
        return None
    values = [
        value for value in list_supported(case.plan.layout, "recompute") if value in ("selective", "full")
    ]
    return case.find_best(evaluate_variants(case.plan, [({"recompute": value}, {}) for value in values]))


def check_missing_recomputation(case: Case) -> Iterator[Finding]:
    """Report a plan that is out of memory without recomputation and fits with it."""
    fixed = find_recomputation(case)
    if fixed is None or case.memory is None:
        return
    won = case.memory.peak_bytes - fixed.memory.peak_bytes
    short = case.memory.peak_bytes - case.memory.usable_bytes
    kind = WORDS[fixed.plan.recipe.recompute]
    yield Finding(
        name="recomputation-off",
        severity="danger",
        why=f"The worst rank is {format_gib(short)} GiB short while all activations are kept; {kind} saves "
        f"{format_gib(won)} GiB{_describe_cost(case, fixed)} (Chen et al. 2016).",
        number=won / 2**30,
        change=kind[:1].upper() + kind[1:],
        plan=fixed.plan,
    )


def _describe_cost(case: Case, fixed: Variant) -> str:
    """Return the cost in time as text; empty if it is not known."""
    lost = -case.compute_gain(fixed)
    return (
        ""
        if case.step is None
        else f", {format_percent(lost)} slower"
        if lost >= 0.005
        else ", about as fast"
    )


def check_unneeded_recomputation(case: Case) -> Iterator[Finding]:
    """Report recomputed or offloaded activations although they would fit.

    A tight fit does not count: some of such runs run out of memory (``MemoryReport.is_tight``).
    """
    # Less recomputation needs more memory, so it must fit, and not tightly.
    recipe = case.plan.recipe
    if case.step is None or case.memory is None or recipe.recompute == "none" or not case.has_room:
        return
    less = [value for value in ("none", "selective") if value != recipe.recompute]
    less = [value for value in less if value in list_supported(case.plan.layout, "recompute")]
    # recompute_interval is reset, because it must be 1 without recomputation.
    candidates = evaluate_variants(
        case.plan, [({"recompute": value, "recompute_interval": 1}, {}) for value in less]
    )
    fixed = find_fastest(variant for variant in candidates if not variant.memory.is_tight)
    if fixed is None or case.compute_gain(fixed) < NOTICEABLE:
        return
    won = case.step.seconds - fixed.step.seconds
    kind, name = WORDS[fixed.plan.recipe.recompute], "recomputation-on"
    if recipe.recompute == "offload":
        name = "activations-offloaded-though-room"
        if fixed.plan.recipe.recompute == "none":
            kind = "activations kept on the GPU"
    yield Finding(
        name=name,
        severity="warning",
        why=f"With {kind}, the peak is {format_gib(fixed.memory.peak_bytes)} of "
        f"{format_gib(fixed.memory.usable_bytes)} GiB and a step is {format_seconds(won)} shorter "
        f"({format_percent(case.compute_gain(fixed))}).",
        number=won,
        change=kind[:1].upper() + kind[1:],
        plan=fixed.plan,
    )
