"""Pipeline bubbles: fewer micro-batches than stages, and stages that are not interleaved."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from shardscope.core.finding import Finding, PlanChange
from shardscope.core.layout import list_divisors
from shardscope.planner.checks.case import (
    NOTICEABLE,
    Case,
    Change,
    Variant,
    evaluate_variants,
    find_fastest,
)
from shardscope.planner.checks.number_format import format_percent
from shardscope.planner.repairs.combined_changes import search_change
from shardscope.timing.pipeline import compute_bubble_seconds
from shardscope.timing.report import format_seconds

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

MUCH_FASTER = 0.1
"""Share of the step from which a bubble that need not be is a warning."""


def check_pipeline_micro_batches(case: Case) -> Iterator[Finding]:
    """Report fewer micro-batches than stages, which idle as :func:`compute_bubble_seconds` says."""
    plan = case.plan
    number, stages = plan.num_micro_batches, plan.degrees.pp
    if stages == 1 or number >= stages:
        return
    # Without a predicted step, the schedule's own formula gives the bubble's ratio to the busy time of one
    # of equal stages, which is converted to a share of the whole step.
    share = case.get_share("bubble")
    if case.step is None:
        ratio = compute_bubble_seconds(stages, 1, plan.degrees.vpp, number)
        share = ratio / (1 + ratio)
    # A smaller micro-batch also makes matrix products less efficient, so it counts only if the whole step
    # gets faster.
    sufficient = (
        variant for variant in evaluate_variants(plan, _list_changes(case)) if _has_enough(variant.plan)
    )
    fixed = case.find_best(variant for variant in sufficient if case.compute_gain(variant) > 0)
    yield Finding(
        name="fewer-micro-batches-than-stages",
        severity="danger" if share > 0.5 else "warning",
        why=f"{number} micro-batches fill {stages} pipeline stages for part of the step only: they wait for "
        f"{format_percent(share)} of it.",
        number=100 * share,
        change=_describe_change(case, fixed.plan)
        if fixed
        else f"Fewer stages than {stages}, or more micro-batches",
        plan=fixed.plan if fixed else None,
        search=None if fixed else partial(_search_filled, plan),
    )


def _search_filled(plan: Plan) -> PlanChange | None:
    """Return the best of all plans, if it has at least as many micro-batches as stages."""
    change = search_change(plan)
    return change if change and _has_enough(change.plan) else None


def _list_changes(case: Case) -> Iterator[Change]:
    """Yield smaller micro-batches first (they keep the global batch), then a larger global batch."""
    plan, recipe = case.plan, case.plan.recipe
    for size in list_divisors(recipe.micro_batch_size):
        yield {"micro_batch_size": size}, {}
    # A larger global batch changes the training, so it is offered only if no smaller micro-batch can fill the
    # stages.
    if recipe.micro_batch_size == 1 or plan.num_micro_batches * recipe.micro_batch_size < plan.degrees.pp:
        times = -(-plan.degrees.pp // plan.num_micro_batches)
        yield {"global_batch_size": recipe.global_batch_size * times}, {}


def _has_enough(plan: Plan) -> bool:
    return plan.num_micro_batches >= plan.degrees.pp


def _describe_change(case: Case, fixed: Plan) -> str:
    recipe = case.plan.recipe
    size, batch = fixed.recipe.micro_batch_size, fixed.recipe.global_batch_size
    if batch == recipe.global_batch_size:
        return f"Micro-batch {size} instead of {recipe.micro_batch_size}"
    return f"Global batch {batch:,} instead of {recipe.global_batch_size:,} sequences"


# ---- As many micro-batches as stages, which still wait at the start and the end of a step


def check_pipeline_bubble(case: Case) -> Iterator[Finding]:
    """Report a bubble that interleaved chunks or smaller micro-batches shorten (Narayanan et al. 2021,
    section 2.2), if the whole step is shorter with them."""
    plan = case.plan
    # Fewer micro-batches than stages are a finding of their own.
    if case.step is None or not case.has_room or plan.degrees.pp == 1:
        return
    share = case.get_share("bubble")
    if plan.num_micro_batches < plan.degrees.pp or share < NOTICEABLE:
        return
    variants = [
        variant
        for variant in evaluate_variants(plan, _list_finer_schedules(plan))
        if not variant.memory.is_tight
        and case.compute_gain(variant) >= NOTICEABLE
        and variant.step.parts["bubble"] < case.step.parts["bubble"]
        and case.keeps_launch(variant.plan)
    ]
    fastest = find_fastest(variants)
    if fastest is None:
        return
    # More chunks mean more transfers: of those about as fast, the one that changes least.
    enough = fastest.step.tokens_per_second * (1 - NOTICEABLE / 2)
    fixed = min(
        (one for one in variants if one.step.tokens_per_second >= enough),
        key=lambda one: (_count_changes(plan, one.plan), one.plan.degrees.vpp),
    )
    won, gain = case.step.seconds - fixed.step.seconds, case.compute_gain(fixed)
    yield Finding(
        name="pipeline-bubble",
        severity="warning" if gain >= MUCH_FASTER else "hint",
        why=f"The {plan.degrees.pp} pipeline stages wait for {format_percent(share)} of the step for each "
        f"other's first and last micro-batches. With {_describe_schedule(plan, fixed)} they wait for "
        f"{format_percent(fixed.step.parts['bubble'] / fixed.step.seconds)}, and a step is "
        f"{format_seconds(won)} shorter ({format_percent(gain)}).",
        number=won,
        change=_describe_schedule(plan, fixed),
        plan=fixed.plan,
    )


def _list_finer_schedules(plan: Plan) -> Iterator[Change]:
    """Yield more chunks for each stage, smaller micro-batches, and both."""
    layout, size = plan.layout, plan.recipe.micro_batch_size
    chunks = {plan.degrees.vpp}
    if "vpp" in layout.choices:
        # Equal chunks only; embedding and loss may count as two layers of Megatron-core.
        layers = plan.architecture.num_hidden_layers
        for total in (layers, layers + 1, layers + 2):
            chunks.update(list_divisors(-(-total // plan.degrees.pp)))
    for smaller in reversed(list_divisors(size)):
        for vpp in sorted(chunks - set(range(plan.degrees.vpp))):
            if (smaller, vpp) != (size, plan.degrees.vpp):
                yield {"micro_batch_size": smaller}, {} if vpp == plan.degrees.vpp else {"vpp": vpp}


def _count_changes(plan: Plan, other: Plan) -> int:
    return (other.degrees.vpp != plan.degrees.vpp) + (
        other.recipe.micro_batch_size != plan.recipe.micro_batch_size
    )


def _describe_schedule(plan: Plan, variant: Variant) -> str:
    parts, other = [], variant.plan
    if other.degrees.vpp != plan.degrees.vpp:
        parts.append(f"vpp={other.degrees.vpp}")
    if other.recipe.micro_batch_size != plan.recipe.micro_batch_size:
        parts.append(f"micro_batch_size={other.recipe.micro_batch_size}")
    return " and ".join(parts)
