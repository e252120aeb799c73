"""Pipeline bubbles: fewer micro-batches than stages."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from shardscope.core.finding import Finding, PlanChange
from shardscope.core.layout import list_divisors
from shardscope.planner.checks.case import Case, Change, evaluate_variants, find_fastest
from shardscope.planner.checks.number_format import format_percent
from shardscope.planner.repairs.combined_changes import search_change
from shardscope.timing.pipeline import compute_bubble_seconds

if TYPE_CHECKING:
    from shardscope.core.plan import Plan


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
    fixed = find_fastest(variant for variant in sufficient if case.compute_gain(variant) > 0)
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
