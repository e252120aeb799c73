"""DDP defaults that the preflight checks depend on: reduction type, fp32 weights, checkpoint format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from shardscope.core.precision import FP32, widths
from shardscope.frameworks.defaults import CheckpointFormat, ReduceType, describe_torch_checkpoint

if TYPE_CHECKING:
    from shardscope.core.plan import Plan


def get_reduce_type(plan: Plan) -> ReduceType:
    """Return the gradient reduction type: that of the weights, which autocast leaves in fp32."""
    return "fp32" if widths[plan.recipe.precision].reduce == FP32 else "bf16"


def keeps_fp32_weights(plan: Plan) -> bool:
    """Return whether the optimizer updates fp32 weights: autocast casts copies of them."""
    return widths[plan.recipe.precision].original == FP32


def suggest_fp32_reduction(plan: Plan) -> tuple[str, Plan | None]:
    """Return the suggested fix, fp32 weights with autocast, and the plan with it; None if it is invalid."""
    try:
        mended = replace(plan, recipe=replace(plan.recipe, precision="bf16-mixed"))
    except ValueError:  # Mixed precision conflicts with another field of the recipe.
        return "Mixed precision (bf16)", None
    return "Mixed precision (bf16)", mended


def pad_vocab_size(plan: Plan) -> int:
    """Return the vocabulary size: DDP does not pad it."""
    return plan.architecture.vocab_size


def get_checkpoint_format(plan: Plan) -> CheckpointFormat:
    """Return the checkpoint format: torch.distributed.checkpoint, under the model's own parameter names."""
    return describe_torch_checkpoint(plan)


def find_unused_options(plan: Plan) -> Mapping[str, str]:
    """Return the options that have no effect: none."""
    return {}


def find_overlap_options(plan: Plan) -> Mapping[str, object]:
    """Return the overlap options that are off by default: none."""
    return {}
