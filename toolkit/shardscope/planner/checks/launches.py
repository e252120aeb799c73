"""Micro-batches that are too small: the GPU waits while the host starts kernels, or for what each micro-batch
transfers again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardscope.core.cluster import name_device
from shardscope.core.finding import Finding
from shardscope.core.number_format import format_gib
from shardscope.core.plan import Plan
from shardscope.frameworks.registry import is_trained
from shardscope.planner.checks.case import (
    NOTICEABLE,
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
from shardscope.timing.calibration.selection import select_rates
from shardscope.timing.report import Part, format_seconds

LAUNCH_BOUND = 0.1
"""Share of the step spent waiting for launches from which it is worth reporting."""
MUCH_FASTER = 0.1
"""Share of the step from which a larger micro-batch is worth reporting: the usual error of a prediction."""
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
    waiting = _compute_wait(case)
    if case.step is None or waiting is None:
        return
    # A plan that our engines train is not changed into one that they do not.
    launched = is_trained(plan)
    candidates = [
        variant
        for variant in evaluate_variants(plan, _list_changes(plan))
        if case.compute_gain(variant) > 0 and (not launched or is_trained(variant.plan))
    ]
    # Nor into a tight one, which may run out of memory, unless that is over a third faster.
    fixed = case.find_best(candidates)
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


def _compute_wait(case: Case) -> float | None:
    """Return the seconds that a launch-bound step waits for the host; None for other steps."""
    plan = case.plan
    if case.step is None or not plan.on_gpu or case.has_room is False:
        return None
    without = predict_step(plan, replace(select_rates(plan.cluster), kernel_seconds=0.0))
    waiting = case.step.seconds - without.seconds
    return None if waiting < LAUNCH_BOUND * case.step.seconds else waiting


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


# ---- Micro-batches that repeat transfers


_REPEATED: dict[Part, str] = {
    "gathers": "all-gathers the weights again",
    "gradients": "reduces or adds up gradients again",
    "offload": "moves state to and from the host again",
}
"""Work of each micro-batch that does not grow with it."""


def check_repeated_transfers(case: Case) -> Iterator[Finding]:
    """Report accumulation over micro-batches that each transfer weights or gradients again, although a larger
    micro-batch fits and is clearly faster."""
    plan = case.plan
    # Pipeline stages need many micro-batches (check_pipeline_bubble).
    if case.step is None or case.memory is None or not case.has_room or plan.degrees.pp > 1:
        return
    if plan.num_micro_batches == 1 or max(case.get_share(part) for part in _REPEATED) < MUCH_FASTER:
        return
    # A launch-bound step has a finding with the same change.
    if _compute_wait(case) is not None:
        return
    factors = (factor for factor in range(2, _MAX_GROWTH + 1) if plan.num_micro_batches % factor == 0)
    changes: list[Change] = [
        ({"micro_batch_size": factor * plan.recipe.micro_batch_size}, {}) for factor in factors
    ]
    variants = [
        variant
        for variant in evaluate_variants(plan, changes)
        if not variant.memory.is_tight
        and case.compute_gain(variant) >= MUCH_FASTER
        and case.keeps_launch(variant.plan)
    ]
    fastest = find_fastest(variants)
    if fastest is None:
        return
    # The smallest micro-batch that is about as fast: activations grow with it.
    enough = fastest.step.tokens_per_second * (1 - NOTICEABLE)
    fixed = next(variant for variant in variants if variant.step.tokens_per_second >= enough)
    before, after = case.step.parts, fixed.step.parts
    part = max(_REPEATED, key=lambda name: before[name] - after[name])
    won = case.step.seconds - fixed.step.seconds
    # Some frameworks reduce gradients once in a step: there the gain is another, such as larger matmuls.
    if sum(before[name] - after[name] for name in _REPEATED) < won / 2:
        return
    yield Finding(
        name="micro-batches-repeat-transfers",
        severity="warning",
        why=f"Each of {plan.num_micro_batches} micro-batches {_REPEATED[part]}. With "
        f"{fixed.plan.recipe.micro_batch_size} sequences in each instead of {plan.recipe.micro_batch_size}, "
        f"a step is {format_seconds(won)} shorter ({format_percent(case.compute_gain(fixed))}), and it "
        f"needs {format_gib(fixed.memory.peak_bytes)} of {format_gib(fixed.memory.usable_bytes)} GiB on each "
        f"{name_device(plan.cluster)}.",
        number=won,
        change=f"Micro-batch {fixed.plan.recipe.micro_batch_size} instead of {plan.recipe.micro_batch_size}",
        plan=fixed.plan,
    )
