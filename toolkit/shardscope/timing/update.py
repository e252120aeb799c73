"""Seconds of the optimizer step on the GPU: memory-bound, except Muon's matmuls.

Numbers may be arrays of plans.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.ops import map_distinct
from shardscope.core.precision import FP32, widths
from shardscope.memory.state.stages import EMBEDDING_GROUPS, count_layers_by_kind, list_rank_shapes

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.plan import Plan
    from shardscope.memory.state.stages import Stage
    from shardscope.timing.rates import Rates

_MOMENT_BYTES = {
    "adamw": 2 * FP32,
    "adamw_foreach": 2 * FP32,
    "paged_adamw": 2 * FP32,
    "adamw_8bit": 2,
    "paged_adamw_8bit": 2,
    "adafactor": 0,
    "sgd": FP32,
    "lion": FP32,
    "muon": FP32,
}
"""Bytes of moments read and written per weight; moments in the weight's dtype are scaled to its width."""
_IN_WEIGHTS_TYPE = frozenset({"adamw", "adamw_foreach", "sgd", "lion", "muon"})
_FOREACH_PASSES = 3
"""torch/optim/adam.py, ``_multi_tensor_adam``: eight operators on parameters, gradients, moments and a
temporary read and write 84 bytes per weight, the fused kernel 28."""
_CLIP_PASSES = 3
"""Clipping reads all gradients for their norm, reads them again and writes them scaled."""
_NEWTON_SCHULZ_ROUNDS = 5
"""torch/optim/_muon.py, ``ns_steps``."""


def compute_update_seconds(
    plan: Plan, stage: Stage, updated: float, main_copies: bool, rates: Rates
) -> float:
    """Return the seconds of one step over ``updated`` weights of a rank.

    All state is read and, except gradients, written. ``main_copies``: gradients and the updated weights are
    fp32 and cast to the module's weights.
    """
    name, width = plan.recipe.optimizer, widths[plan.recipe.precision]
    original = FP32 if main_copies else width.original
    # torch creates moments by zeros_like(parameter), in the dtype of the weights (torch 2.13, optim/adam.py,
    # _init_group); bitsandbytes 0.50.2 in fp32 or 8 bits, whatever the weights have (optim/optimizer.py,
    # init_state).
    moments = _MOMENT_BYTES[name] * (original / FP32 if name in _IN_WEIGHTS_TYPE else 1)
    # Bytes per weight: weights and moments are read and written, gradients are read.
    weight_bytes = 2 * original + 2 * moments + original
    if name == "adamw_foreach":
        weight_bytes = weight_bytes * _FOREACH_PASSES
    weight_bytes = weight_bytes + _CLIP_PASSES * original + main_copies * width.compute
    seconds = updated * weight_bytes / rates.get_memory_bandwidth()
    return seconds if name != "muon" else seconds + _compute_newton_schulz_seconds(plan, stage, rates)


class _Rounds(NamedTuple):
    multiplied: float
    moved: float


def _compute_newton_schulz_seconds(plan: Plan, stage: Stage, rates: Rates) -> float:
    """Return the seconds of five iterations per hidden matrix, unsharded on every rank, in bf16.

    Jordan et al. 2024.
    """
    arch, degrees = plan.architecture, plan.degrees
    seconds: float = 0.0
    # torch 2.13, optim/_muon.py, _zeropower_via_newtonschulz: ``grad.bfloat16()`` in any precision, and all
    # of a matrix on each rank, because the iteration needs whole rows and columns.
    for moe, layers in count_layers_by_kind(arch, stage):
        rounds = map_distinct(partial(_count_rounds, arch, moe), degrees.tp, degrees.ep)
        seconds = seconds + layers * rates.get_matmul_rate("bf16").seconds(rounds.multiplied, rounds.moved)
    return seconds


@lru_cache(maxsize=256)
def _count_rounds(arch: Architecture, moe: bool, tp: int, ep: int) -> _Rounds:
    """Return the cost of all iterations for one layer's matrices.

    Each iteration has X X', its square, and that times X: n n m, n n n and n n m multiplications for an n x m
    matrix with n <= m.
    """
    multiplied = moved = 0
    for group, _, copies, rows, columns in list_rank_shapes(arch, moe, tp, ep):
        # Only hidden matrices: AdamW updates embeddings, head, fused experts and vectors.
        if group in ("experts", *EMBEDDING_GROUPS, "lm_head") or columns == 1:
            continue
        short, long = sorted((rows, columns))
        multiplied += copies * short * short * (2 * long + short)
        moved += copies * (2 * (2 * short * long + short * short) + 3 * short * short)
    return _Rounds(_NEWTON_SCHULZ_ROUNDS * multiplied, _NEWTON_SCHULZ_ROUNDS * moved)
