"""Changes of a plan that would reduce a cost found in a trace, with their predicted gain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from shardscope.core.cluster import choose_mixed_precision
from shardscope.core.serialization import replace_fields

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

Topic = Literal[
    "tp",
    "cp",
    "ep",
    "dp",
    "dp_all_gather",
    "pp",
    "host",
    "elementwise",
    "precision",
    "copies",
    "recomputation",
]
"""The cost to reduce: communication along an axis, launches, a class of kernels, copies."""

MIN_GAIN = 0.01
"""Minimum predicted gain of a suggested change, as a share of the step."""

_LAYOUT_TEXTS = {
    "reshard_after_forward": "keep parameters all-gathered after forward (reshard_after_forward=False)",
    "overlap_comm": "overlap communication (overlap_comm=True)",
    "offload": "keep the training state on the GPU",
    "offload_optimizer": "keep the optimizer on the GPU",
    "offload_params": "keep parameters on the GPU",
}


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A changed plan that fits into memory, and its predicted gain."""

    text: str
    plan: Plan
    gain_seconds: float
    """Predicted seconds that a step gets shorter."""
    predicted_seconds: float
    """Predicted step of the plan as it is, which :attr:`gain_seconds` is a part of."""


def suggest_change(plan: Plan, topic: Topic) -> Suggestion | None:
    """Return the change with the largest predicted gain for ``topic``; None if none fits and gains 1 %."""
    try:
        seconds = plan.step().seconds
    except ValueError:
        return None  # a figure of the GPU is unknown
    best: Suggestion | None = None
    for text, layout, recipe in _list_changes(plan, topic):
        try:
            changed = replace(
                plan,
                layout=replace_fields(plan.layout, layout) if layout else plan.layout,
                recipe=replace_fields(plan.recipe, recipe) if recipe else plan.recipe,
            )
            if not changed.memory().fits:
                continue
            gain = seconds - changed.step().seconds
        except ValueError:
            continue  # this plan cannot run, or has no formula
        if gain >= MIN_GAIN * seconds and (best is None or gain > best.gain_seconds):
            best = Suggestion(text=text, plan=changed, gain_seconds=gain, predicted_seconds=seconds)
    return best


def _list_changes(plan: Plan, topic: Topic) -> Iterator[tuple[str, dict[str, object], dict[str, object]]]:
    """Yield the text of each change, with the changed fields of the layout and of the recipe."""
    layout, recipe, degrees = plan.layout, plan.recipe, plan.degrees
    axes = {"tp": degrees.tp, "cp": degrees.cp, "ep": degrees.ep, "pp": degrees.pp}
    if topic in axes and axes[topic] > 1 and hasattr(layout, topic):
        yield f"{topic}={axes[topic] // 2} instead of {axes[topic]}", {topic: axes[topic] // 2}, {}
    if topic == "pp":
        yield f"vpp={2 * degrees.vpp} virtual stages", {"vpp": 2 * degrees.vpp}, {}
    # Gradients are reduced as before where parameters stay gathered.
    if topic == "dp_all_gather" and getattr(layout, "reshard_after_forward", False):
        yield _LAYOUT_TEXTS["reshard_after_forward"], {"reshard_after_forward": False}, {}
    if topic == "dp":
        if not getattr(layout, "overlap_comm", True):
            yield _LAYOUT_TEXTS["overlap_comm"], {"overlap_comm": True}, {}
        stage = getattr(layout, "stage", 0)
        for lower in range(1, stage):
            yield f"ZeRO stage {lower} instead of {stage}", {"stage": lower}, {}
    if topic in ("dp", "host") and plan.num_micro_batches > 1:
        size = 2 * recipe.micro_batch_size
        yield f"micro-batches of {size} instead of {recipe.micro_batch_size}", {}, {"micro_batch_size": size}
    if topic in ("host", "elementwise"):
        for kernels in ("compiled", "liger"):
            if recipe.kernels != kernels and kernels in layout.supported_kernels:
                yield f"{kernels} kernels", {}, {"kernels": kernels}
    if topic == "precision" and recipe.precision == "fp32":
        precision = choose_mixed_precision(plan.cluster.gpu)
        yield f"mixed precision ({precision})", {}, {"precision": precision}
    if topic == "recomputation" and recipe.recompute != "none":
        for kind in ("none", "selective"):
            if kind != recipe.recompute:
                yield f"recompute={kind!r} instead of {recipe.recompute!r}", {}, {"recompute": kind}
    if topic == "copies":
        for field in ("offload", "offload_optimizer", "offload_params"):
            if getattr(layout, field, None) is not None:
                yield _LAYOUT_TEXTS[field], {field: None}, {}
