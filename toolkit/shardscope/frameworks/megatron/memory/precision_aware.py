"""The types of Megatron-core's gradients and optimizer, where Transformer Engine's Adam keeps smaller states.

megatron/core/optimizer/distrib_optimizer.py (``use_precision_aware_optimizer``) leaves the main weights to it
and hands it the gradients as they are; transformer_engine/pytorch/optimizers/fused_adam.py keeps them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardscope.core.arrays.arithmetic import largest, where
from shardscope.core.precision import FP32, HALF
from shardscope.memory.report import Term

if TYPE_CHECKING:
    from shardscope.core.recipe import Recipe

_BYTES = {"fp32": FP32, "bf16": HALF, "fp16": HALF, "fp8": 1}


def reduces_in_fp32(layout: Any, recipe: Recipe) -> bool:
    """Whether gradients are accumulated in fp32; unless chosen, with all but fp16 weights.

    "fp16 param, fp16 grads" (Megatron-LM, docs/source/api-guide/dist_optimizer.md; training/arguments.py has
    ``accumulate_allreduce_grads_in_fp32`` with bf16).
    """
    chosen: bool | None = layout.grad_reduce_in_fp32
    return recipe.precision != "fp16-mixed" if chosen is None else chosen


def kept_bytes(layout: Any, recipe: Recipe) -> int:
    """Bytes a weight: both moments, and the main weight or of a bf16 one its lower half.

    ``store_param_remainders``: the upper 16 bits are the bf16 weight's own.
    """
    main = FP32 if recipe.precision == "fp16-mixed" else HALF
    return main + _BYTES[layout.exp_avg_dtype] + _BYTES[layout.exp_avg_sq_dtype]


def words(layout: Any, recipe: Recipe) -> str:
    """What these bytes are."""
    main = "fp32 main weights" if recipe.precision == "fp16-mixed" else "the lower 16 bits of main weights"
    return (
        f"{main}, moments in {layout.exp_avg_dtype} and {layout.exp_avg_sq_dtype} "
        "(use_precision_aware_optimizer; Transformer Engine, fused_adam.py)"
    )


def working(layout: Any, dense: Any, experts: Any) -> Term:
    """Moments of another type than fp32 are copied to fp32 for the update (``get_unscaled_state``).

    Those of all weights of one optimizer at once: with ep > 1 experts have one of their own.
    """
    copied = sum(kept != "fp32" for kept in (layout.exp_avg_dtype, layout.exp_avg_sq_dtype))
    at_once = where(layout.ep > 1, largest(dense, experts), dense + experts)
    return Term(
        FP32 * copied * at_once,
        lambda: f"{at_once:,} × {FP32 * copied} bytes · fp32 copies of moments for the update",
    )
