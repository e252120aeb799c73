"""Dtypes of Megatron-core's gradients and precision-aware optimizer (Transformer Engine's Adam).

With ``use_precision_aware_optimizer``, megatron/core/optimizer/distrib_optimizer.py passes gradients in their
own dtype, and transformer_engine/pytorch/optimizers/fused_adam.py holds the main weights and the moments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.core.ops import maximum, where
from shardscope.core.precision import FP32, HALF
from shardscope.memory.report import Term

if TYPE_CHECKING:
    from shardscope.core.recipe import Recipe
    from shardscope.frameworks.megatron.layout import MegatronLayout

_BYTES = {"fp32": FP32, "bf16": HALF, "fp16": HALF, "fp8": 1}


def reduces_in_fp32(layout: MegatronLayout, recipe: Recipe) -> bool:
    """Return whether gradients are accumulated and reduced in fp32: by default, unless weights are fp16.

    Source: "fp16 param, fp16 grads" (Megatron-LM, docs/source/api-guide/dist_optimizer.md);
    training/arguments.py sets ``accumulate_allreduce_grads_in_fp32`` with bf16.
    """
    chosen = layout.grad_reduce_in_fp32
    return recipe.precision != "fp16-mixed" if chosen is None else chosen


def compute_state_width(layout: MegatronLayout, recipe: Recipe) -> int:
    """Return the optimizer's bytes per parameter: both moments and the main weight.

    For bf16 weights only the lower 16 bits of the main weight are stored (``store_param_remainders``): the
    upper 16 bits are the bf16 weight.
    """
    main = FP32 if recipe.precision == "fp16-mixed" else HALF
    return main + _BYTES[layout.exp_avg_dtype] + _BYTES[layout.exp_avg_sq_dtype]


def describe_state(layout: MegatronLayout, recipe: Recipe) -> str:
    """Describe the bytes of :func:`compute_state_width`."""
    main = "fp32 main weights" if recipe.precision == "fp16-mixed" else "the lower 16 bits of main weights"
    return (
        f"{main}, moments in {layout.exp_avg_dtype} and {layout.exp_avg_sq_dtype} "
        "(use_precision_aware_optimizer; Transformer Engine, fused_adam.py)"
    )


def compute_working_memory(layout: MegatronLayout, dense: int, experts: int) -> Term:
    """Return the working memory of the update: fp32 copies of moments in other dtypes.

    One optimizer copies the moments of all its weights at once (``get_unscaled_state``). With ep > 1 experts
    have their own optimizer.
    """
    copied = sum(dtype != "fp32" for dtype in (layout.exp_avg_dtype, layout.exp_avg_sq_dtype))
    at_once = where(layout.ep > 1, maximum(dense, experts), dense + experts)
    return Term(
        FP32 * copied * at_once,
        lambda: f"{at_once:,} × {FP32 * copied} bytes · fp32 copies of moments for the update",
    )
