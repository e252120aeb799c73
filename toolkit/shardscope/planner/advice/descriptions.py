"""Texts of advice: plans, memory, seconds and differences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.core.cluster import name_device
from shardscope.core.errors import FieldError
from shardscope.core.number_format import format_gib, format_rate, join_list
from shardscope.memory.state.quantization import count_quantized
from shardscope.planner.memory_needs import WHILE_BUILT, list_memory_needs
from shardscope.timing.report import format_seconds

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.plan import Plan
    from shardscope.core.recipe import Recipe
    from shardscope.planner.advice.plan_evaluator import EvaluatedPlan

AGAIN = {
    "selective": "selective recomputation",
    "full": "full recomputation",
    "offload": "activations on the host",
}


def name_plan(plan: Plan, wanted: Recipe | None = None) -> str:
    """Return a layout's name with the changes to ``wanted``:
    ``FSDP2 (tp 8), micro-batch 1, full recomputation``."""
    layout, recipe = plan.layout, plan.recipe
    name_text = layout.full_description
    if getattr(layout, "reshard_after_forward", True) is False:
        kept = "weights kept between forward and backward"
        # Add to existing parentheses instead of opening a second pair.
        name_text = f"{name_text[:-1]}, {kept})" if name_text.endswith(")") else f"{name_text} ({kept})"
    parts = [name_text]
    # Then the changes to the recipe; without a requested recipe, what the reader needs to tell plans apart.
    if wanted is None or recipe.micro_batch_size != wanted.micro_batch_size:
        parts.append(f"micro-batch {recipe.micro_batch_size}")
    if wanted is None or recipe.recompute != wanted.recompute:
        parts += (
            [AGAIN[recipe.recompute]] if recipe.recompute in AGAIN else ["no recomputation"] * bool(wanted)
        )
    if recipe.loss and (wanted is None or recipe.loss != wanted.loss):
        parts.append(f"{recipe.loss} loss")
    if wanted is not None and recipe.method != wanted.method:
        parts.append({"lora": "LoRA", "qlora": "QLoRA", "full": "all weights"}[recipe.method])
    return ", ".join(parts)


def describe_needs(evaluated: EvaluatedPlan) -> str:
    """Return ``needs 54.0 of 79.1 GiB per GPU``, with host memory and NVMe if the step needs them."""
    amounts = []
    for need in list_memory_needs(evaluated.plan, evaluated.report):
        # Building the model needs memory once, and seldom the most: mention it only if it is the reason for
        # the misfit.
        if need.name == WHILE_BUILT and tuple(evaluated.short) != (need,):
            continue
        where = (
            f"per {name_device(evaluated.plan.cluster)}"
            if need.name == "GPU memory"
            else f"of {need.name} per node"
        )
        room = "" if need.room_bytes is None else f" of {format_gib(need.room_bytes)}"
        amounts.append(f"{format_gib(need.needed_bytes)}{room} GiB {where}")
    return f"needs {join_list(amounts)}"


def describe_unknown_memory(evaluated: EvaluatedPlan) -> str:
    """Return the text on needed memory whose size the cluster leaves unset; empty if there is none."""
    amounts = [
        f"{format_gib(need.needed_bytes)} GiB of {need.name}"
        for need in list_memory_needs(evaluated.plan, evaluated.report)
        if need.room_bytes is None and need.name != WHILE_BUILT
    ]
    if not amounts:
        return ""
    return f"Check that each node has {join_list(amounts)}: the cluster does not state how much it has."


def describe_shortage(evaluated: EvaluatedPlan) -> str:
    """Return every shortage: ``12.3 GiB too little on each GPU``."""
    amounts = []
    for need in evaluated.short:
        if need.name == WHILE_BUILT and len(evaluated.short) > 1:
            continue  # Shortages in the step itself come first.
        missing = format_gib(need.short_bytes)
        if need.name == "GPU memory":
            amounts.append(f"{missing} GiB too little on each {name_device(evaluated.plan.cluster)}")
        else:
            what = need.name.replace(WHILE_BUILT, "host memory to build the model in")
            amounts.append(f"{missing} GiB too little of {what} on each node")
    return join_list(amounts)


def describe_speed(evaluated: EvaluatedPlan) -> str:
    """Return ``2.94 s per step, 11,136 tokens/s per GPU``, or a text that the time is not known."""
    report = evaluated.timed
    if report is None:
        return "time not known"
    rate = (
        f"{format_rate(report.tokens_per_second_per_gpu)} tokens/s per {name_device(evaluated.plan.cluster)}"
    )
    return f"{format_seconds(report.seconds)} per step, {rate}"


def compare_speed(evaluated: EvaluatedPlan, other: EvaluatedPlan) -> str:
    """Compare two step times: ``18 % faster``, ``2.3x slower`` or ``no faster``."""
    if not evaluated.seconds or not other.seconds:
        return "no time known"
    return compare_seconds(evaluated.seconds, other.seconds)


def compare_seconds(seconds: float, other_seconds: float) -> str:
    """Compare two numbers of seconds in the same way."""
    fast = seconds < other_seconds
    ratio = other_seconds / seconds if fast else seconds / other_seconds
    # Rounded to whole per cent, it would read "0 % faster".
    if ratio < 1.005:
        return "no faster"
    word = "faster" if fast else "slower"
    if ratio < 2:
        return f"{100 * (ratio - 1):.0f} % {word}"
    return f"{ratio:.{0 if ratio > 10 else 1}f}x {word}"


def describe_recipe_changes(evaluated: EvaluatedPlan, wanted: Recipe) -> str:
    """Return the changes to the requested recipe: ``micro-batch 1 and full recomputation``; empty if there
    are none."""
    recipe = evaluated.plan.recipe
    changes = []
    if recipe.micro_batch_size != wanted.micro_batch_size:
        changes.append(f"micro-batch {recipe.micro_batch_size} instead of {wanted.micro_batch_size}")
    if recipe.recompute != wanted.recompute:
        changes.append(AGAIN.get(recipe.recompute, "no recomputation"))
    if recipe.loss != wanted.loss:
        losses = {"chunked": "in chunks", None: "whole"}
        changes.append(f"the loss {losses.get(recipe.loss, recipe.loss)}")
    return " and ".join(changes)


def format_duration(days: float) -> str:
    """Format a duration: ``1.2 years``, ``34 days``, ``5.1 hours``, ``2.7 minutes``."""
    for unit, length in (("year", 365.25), ("day", 1.0), ("hour", 1 / 24), ("minute", 1 / 1440)):
        number = days / length
        if number >= 1 or unit == "minute":
            shown = f"{number:,.0f}" if number >= 9.95 else f"{number:.2g}"
            return f"{shown} {unit}{'' if shown == '1' else 's'}"
    raise AssertionError("unreachable")


def explain_missing_time(plan: Plan) -> str:
    """Return which figure ``plan.step()`` lacks, and the fix; empty if it lacks none."""
    try:
        plan.step()
    except FieldError as refusal:
        problem = refusal.problem[:1].lower() + refusal.problem[1:]
        return f"{problem}. Fix: {refusal.fix}." if problem else str(refusal)
    except ValueError as refusal:
        return str(refusal)
    return ""


def describe_frozen_base(arch: Architecture, recipe: Recipe) -> str:
    """Return the size and number format of a frozen base: ``6.98B of 8.03B frozen parameters in nf4, the rest
    in bf16``."""
    number, precision = abbreviate_count(arch.num_parameters), recipe.precision.removesuffix("-mixed")
    if recipe.base_quantization is None:
        return f"{number} frozen parameters in {precision}"
    quantized = abbreviate_count(count_quantized(arch))
    return f"{quantized} of {number} frozen parameters in {recipe.base_quantization}, the rest in {precision}"


def abbreviate_count(number: float) -> str:
    """Format a number of parameters or tokens: ``8.03B``, ``124M``."""
    if number >= 1e12:
        return f"{number / 1e12:.3g}T"
    if number >= 1e9:
        return f"{number / 1e9:,.0f}B" if number >= 99.5e9 else f"{number / 1e9:.3g}B"
    return f"{number / 1e6:.3g}M"
