"""Model FLOPs and hardware FLOPs per token of a plan."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from shardscope.core.ops import ceil_div
from shardscope.memory.activations.forward import find_modules
from shardscope.timing.matmul import count_attention_flops_per_token

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.plan import Plan


@lru_cache(maxsize=1024)
def _all_trained(architecture: Architecture, seq_len: int, causal: bool) -> float:
    """Return :meth:`Architecture.flops_per_token`, cached for all plans of a model."""
    return architecture.flops_per_token(seq_len, causal=causal)


def count_model_flops_per_token(plan: Plan, causal: bool) -> float:
    """Return training FLOPs per token, forward and backward, without recomputation.

    Frozen weights (the adapters' base, the head included) need no weight gradients: 4 FLOPs each instead of
    6, or MFU would count FLOPs that are never executed. The adapters' own matmuls, below 1 %, are left out.
    """
    arch = plan.architecture
    flops = _all_trained(arch, plan.recipe.seq_len, causal)
    return flops - 2.0 * arch.matrix_parameters_per_token if plan.recipe.has_adapters else flops


def count_hardware_flops_per_token(plan: Plan) -> float:
    """Return executed FLOPs per token, recomputation and scores that a mask hides included.

    Full recomputation repeats a layer's forward; Megatron's selective recomputation repeats only core
    attention (Korthikanti et al. 2022, section 5); a chunked loss repeats the head's matmul. That the
    backward of fused attention computes the scores again is not counted (Dao 2023, section 4).
    """
    arch, recipe = plan.architecture, plan.recipe
    matrices = 2.0 * arch.matrix_parameters_per_token
    head = 2.0 * arch.vocab_size * arch.hidden_size
    attention = arch.num_hidden_layers * count_attention_flops_per_token(arch, find_modules(plan))
    recomputed = 0.0
    if recipe.recompute == "full":
        # Checkpointing wraps decoder layers (transformers 5.24, modeling_layers.py,
        # GradientCheckpointingLayer), so the head's matmul does not run again.
        recomputed = matrices - head + attention
    elif recipe.recompute == "selective" and plan.kernels == "megatron":
        recomputed = attention
    # The first of every ``recompute_interval`` layers is recomputed, so their number is rounded up.
    layers = arch.num_hidden_layers
    recomputed *= float(ceil_div(layers, recipe.recompute_interval)) / layers
    if recipe.loss == "chunked":
        recomputed += head
    # Backward has twice the forward's matmuls; frozen matrices have no weight gradients.
    passes = 2 if recipe.has_adapters else 3
    return passes * matrices + 3 * attention + recomputed
