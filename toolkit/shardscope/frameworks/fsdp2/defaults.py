"""What FSDP2 does by itself: reductions as its policy says, checkpoints for any ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from shardscope.core.precision import FP32, widths
from shardscope.frameworks.defaults import CheckpointFormat, ReduceType, torch_checkpoint

if TYPE_CHECKING:
    from shardscope.core.plan import Plan


def reduces_in(plan: Plan) -> ReduceType:
    """``MixedPrecisionPolicy.reduce_dtype``, which Shardscope's engine sets to fp32, or the weights' type."""
    return "fp32" if widths[plan.recipe.precision].reduce == FP32 else "bf16"


def keeps_fp32_weights(plan: Plan) -> bool:
    """The sharded originals; ``param_dtype`` is the gathered copies'."""
    return widths[plan.recipe.precision].original == FP32


def reduce_remedy(plan: Plan) -> tuple[str, Plan | None]:
    """fp32 originals, gathered in bf16."""
    try:
        mended = replace(plan, recipe=replace(plan.recipe, precision="bf16-mixed"))
    except ValueError:  # It does not go with the rest of the recipe.
        return "Mixed precision (bf16)", None
    return "Mixed precision (bf16)", mended


def padded_vocab_size(plan: Plan) -> int:
    """A DTensor's last shards may be shorter; nothing is padded that is computed with."""
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
