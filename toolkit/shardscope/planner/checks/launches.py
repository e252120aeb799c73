"""Launch-bound steps: the GPU waits while the host starts kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardscope.core.finding import Finding
from shardscope.core.plan import Plan
from shardscope.frameworks.registry import is_trained
from shardscope.planner.advice.plan_evaluator import SAFE
from shardscope.planner.checks.case import (
    Case,
    Change,
    Variant,
    evaluate_variants,
    find_fastest,
    replace_plan_fields,
)
from shardscope.planner.checks.number_format import format_percent
from shardscope.prediction.step import predict_step
from shardscope.prediction.support import list_supported
from shardscope.timing.calibration.curves import select_rates
from shardscope.timing.report import format_seconds

LAUNCH_BOUND = 0.1
"""Share of the step spent waiting for launches from which it is worth reporting."""
_FEWER_KERNELS = ("compiled", "liger")
"""Values of ``Recipe.kernels`` that fuse operators."""
_MAX_GROWTH = 32
"""The largest micro-batch that is tried, relative to the plan's."""


def check_launch_bound(case: Case) -> Iterator[Finding]:
    """Report a step whose GPUs wait for the host for a tenth of it or more, with the fastest change.

    The wait is what the step would save if starting a kernel took no time. A plan that does not fit has no
    such finding: its repair comes first, and changes the step.
    """
    plan = case.plan
    if case.step is None or not plan.on_gpu or case.has_room is False:
        return
    without = predict_step(plan, replace(select_rates(plan.cluster), kernel_seconds=0.0))
    waiting = case.step.seconds - without.seconds
    if waiting < LAUNCH_BOUND * case.step.seconds:
        return
    # A plan that our engines train is not changed into one that they do not.
    launched = is_trained(plan)
    candidates = [
        variant
        for variant in evaluate_variants(plan, _list_changes(plan))
        if case.compute_gain(variant) > 0 and (not launched or is_trained(variant.plan))
    ]
    fixed = find_fastest(candidates)
    with_room = find_fastest(variant for variant in candidates if not variant.memory.is_tight)
    # Nor into a tight one, which may run out of memory, unless that is over a third faster.
    if fixed and with_room and fixed.step.tokens_per_second <= SAFE * with_room.step.tokens_per_second:
        fixed = with_room
    won = ""
    if fixed is not None:
        saved = case.step.seconds - fixed.step.seconds
        # The same change fuses kernels or enlarges matmuls, and reduces gradients less often.
        more = ", which is more than the wait: it saves other time as well" if saved > waiting else ""
        won = (
            f" With the change a step is {format_seconds(saved)} shorter "
            f"({format_percent(case.compute_gain(fixed))}){more}."
        )
    yield Finding(
        name="launch-bound",
        severity="warning",
        why=f"The GPUs wait {format_seconds(waiting)} of a step "
        f"({format_percent(waiting / case.step.seconds)}) for the host to start kernels, which are too small "
        f"to keep them busy.{won}",
        number=waiting,
        change=_describe_change(plan, fixed) if fixed else _describe_directions(plan),
        plan=fixed.plan if fixed else None,
    )


def _describe_directions(plan: Plan) -> str:
    """Return what helps where no single change of the recipe does."""
    directions = ["a larger global batch in larger micro-batches"]
    if plan.degrees.tp > 1:
        directions.append("fewer tensor-parallel ranks")
    if plan.kernels not in _FEWER_KERNELS and _list_fused_kernels(plan):
        directions.append("kernels that fuse operators")
    return " or ".join(directions).capitalize()


def _list_fused_kernels(plan: Plan) -> list[str]:
    """Return the kernels that fuse operators, as far as this model and recipe have them."""
    supported = [name for name in _FEWER_KERNELS if name in list_supported(plan.layout, "kernels")]
    return [name for name in supported if replace_plan_fields(plan, recipe={"kernels": name})]


def _list_changes(plan: Plan) -> Iterator[Change]:
    """Yield larger micro-batches of the same global batch, kernels that fuse operators, and both."""
    fused = _list_fused_kernels(plan)
    # Every divisor, not only powers of two: three micro-batches can be one.
    for growth in (factor for factor in range(1, _MAX_GROWTH + 1) if plan.num_micro_batches % factor == 0):
        for kernels in (plan.recipe.kernels, *fused):
            if growth > 1 or kernels != plan.recipe.kernels:
                yield {"micro_batch_size": growth * plan.recipe.micro_batch_size, "kernels": kernels}, {}


def _describe_change(plan: Plan, variant: Variant) -> str:
    parts, changed = [], variant.plan
    if changed.recipe.micro_batch_size != plan.recipe.micro_batch_size:
        parts.append(f"micro-batch {changed.recipe.micro_batch_size}")
    if changed.kernels != plan.kernels:
        parts.append(f"{changed.kernels} kernels")
    tight = ", which is tight" if variant.memory.is_tight else ""
    return " and ".join(parts).capitalize() + tight
