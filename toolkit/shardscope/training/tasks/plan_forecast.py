"""Memory, steps, time and cost of a fine-tune by its plan, as sentences for the preview of its data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.core.number_format import format_count, format_gib
from shardscope.training.examples.preview import Preview
from shardscope.training.tasks.choices import estimate_length

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.training.tasks.finetune import Finetune

HOUR_SECONDS = 3600.0


def describe_forecast(task: Finetune, plan: Plan, preview: Preview) -> tuple[str, ...]:
    """Return what ``plan`` predicts for ``task`` on these data, and which number is not known."""
    report = plan.memory()
    lines = [
        f"Memory by the plan: {format_gib(report.peak_bytes)} GiB on the rank that needs the most, of "
        f"{format_gib(report.usable_bytes)} GiB usable."
    ]
    length = estimate_length(task, plan, preview)
    if length.num_steps is None:
        return (*lines, "Time and cost are not known, because the number of steps is not.")
    sequences = format_count(plan.recipe.global_batch_size, "sequence")
    passes = "" if length.num_epochs is None else f" in {length.num_epochs:g} epochs"
    steps = f"{format_count(length.num_steps, 'step')} of {sequences}{passes}"
    try:
        step = plan.step()
    except ValueError as error:
        return (*lines, f"{steps}. Their time and cost are not known: {error}")
    seconds = length.seconds if length.seconds is not None else length.num_steps * step.seconds
    lines.append(f"{steps}: about {_format_duration(seconds)} by plan.step(), without validations.")
    price = step.price_per_hour_usd
    if price is None:
        lines.append(f"The cost is not known: {plan.cluster.gpu.name} has no price (GPU.price_per_hour_usd).")
    else:
        cost = price * seconds / HOUR_SECONDS
        amount = "less than $0.01" if cost < 0.01 else f"about ${cost:,.2f}"
        lines.append(f"Cost: {amount} at ${price:,.2f} per hour.")
    return tuple(lines)


def _format_duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return (
        f"{seconds / 60:.0f} minutes" if seconds < 2 * HOUR_SECONDS else f"{seconds / HOUR_SECONDS:.1f} hours"
    )
