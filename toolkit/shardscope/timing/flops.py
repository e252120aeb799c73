"""FLOPs that a plan's GPUs execute, beside the model's own."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardscope.architecture import Architecture
    from shardscope.plan import Plan


@lru_cache(maxsize=1024)
def model_flops_per_token(architecture: Architecture, seq_len: int, causal: bool) -> float:
    """:meth:`Architecture.flops_per_token`, once for all plans of a model."""
    return architecture.flops_per_token(seq_len, causal=causal)


def hardware_flops_per_token(plan: Plan) -> float:
    """FLOPs executed for one token: the model's, less what frozen weights save, and what is computed again.

    A frozen base (adapters) needs no weight gradients: two thirds of its matrices' FLOPs remain. A layer that
    is recomputed whole repeats its forward, a third; Megatron's selective recomputation repeats attention's
    core alone (Korthikanti et al. 2022, section 5).
    """
    arch, recipe = plan.architecture, plan.recipe
    matrices = 6.0 * arch.matrix_parameters_per_token
    attention = model_flops_per_token(arch, recipe.seq_len, causal=True) - matrices
    head = 6.0 * arch.vocab_size * arch.hidden_size
    trained = matrices * 2 / 3 if recipe.has_adapters else matrices
    again = 0.0
    if recipe.recompute == "full":
        again = (matrices - head + attention) / 3
    elif recipe.recompute == "selective" and plan.kernels == "megatron":
        again = attention / 3
    return trained + attention + again / recipe.recompute_interval
