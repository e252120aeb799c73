"""What DistributedDataParallel does by itself: gradients in the weights' type, checkpoints for any ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from shardscope.core.precision import FP32, widths
from shardscope.frameworks.defaults import CheckpointFormat, ReduceType, torch_checkpoint

if TYPE_CHECKING:
    from shardscope.core.plan import Plan


def reduces_in(plan: Plan) -> ReduceType:
    """Gradients have the type of the weights, which autocast leaves in fp32."""
    return "fp32" if widths[plan.recipe.precision].reduce == FP32 else "bf16"


def keeps_fp32_weights(plan: Plan) -> bool:
    """Autocast casts copies; the optimizer has the originals."""
    return widths[plan.recipe.precision].original == FP32


def reduce_remedy(plan: Plan) -> tuple[str, Plan | None]:
    """fp32 weights, and autocast."""
    try:
        mended = replace(plan, recipe=replace(plan.recipe, precision="bf16-mixed"))
    except ValueError:  # It does not go with the rest of the recipe.
        return "Mixed precision (bf16)", None
    return "Mixed precision (bf16)", mended


def padded_vocab_size(plan: Plan) -> int:
    """It pads nothing."""
    return plan.architecture.vocab_size


def checkpoint(plan: Plan) -> CheckpointFormat:
    """Shardscope's engine saves with torch.distributed.checkpoint, under the model's own names."""
    return torch_checkpoint(plan)


def unused(plan: Plan) -> Mapping[str, str]:
    """Every option that it takes does something."""
    return {}


def overlaps(plan: Plan) -> Mapping[str, object]:
    """None is off by itself."""
    return {}
