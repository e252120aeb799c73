"""fp8 training in megatron-core with Transformer Engine: 8-bit weight copies and required tensor sizes.

Defaults: delayed scaling per tensor, E4M3 forward and E5M2 backward (``fp8="hybrid"``), primary weights in
bf16 (``fp8_param=False``), attention in bf16. ``output_layer`` and routers stay in bf16 too, because they are
not Transformer Engine modules. Scales and amax histories are a few elements per tensor and not counted. Read
from Transformer Engine 2.20 and megatron-core 0.16.1, and never run here.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING

from shardscope.core.cluster import choose_mixed_precision
from shardscope.core.errors import refuse
from shardscope.core.ops import map_distinct
from shardscope.frameworks.megatron.layout import get_layout
from shardscope.memory.activations.modules.attention import get_attention_widths
from shardscope.memory.state.stages import count_layers_by_kind, list_rank_shapes

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.cluster import Cluster, Gpu
    from shardscope.core.plan import Plan
    from shardscope.core.recipe import Recipe
    from shardscope.memory.state.stages import Stage

SOURCE = "read from Transformer Engine 2.20's source and never run here"

_ROWS, _COLUMNS = 8, 16
"""Divisors of every operand's sizes (``pytorch/utils.py``, ``assert_dim_for_fp8_exec``)."""


def count_operand_copies(gpu: Gpu) -> int:
    """Return the 8-bit copies of an operand that several matmuls read: 2 with its transpose, else 1.

    Data-center Blackwell supports every GEMM layout and needs no transpose (``pytorch/utils.py``,
    ``is_non_tn_fp8_gemm_supported``: compute capability 10, not 12, that of RTX GPUs).
    """
    return 1 if gpu.architecture in ("blackwell", "blackwell-ultra") else 2


def count_gradient_copies(plan: Plan) -> int:
    """Return the 8-bit copies of an output gradient, which two backward matmuls read; 0 without fp8."""
    return count_operand_copies(plan.cluster.gpu) if plan.recipe.precision == "fp8-mixed" else 0


def compute_weight_copies(plan: Plan, stage: Stage) -> int:
    """Return the bytes of a stage's cached 8-bit weights, which live from the first micro-batch on.

    ``quantize_weight`` (``pytorch/module/base.py``) refills the cache at the first micro-batch of each step.
    megatron-core's ``disable_parameter_transpose_cache`` is off.
    """
    if plan.recipe.precision != "fp8-mixed":
        return 0
    arch, degrees, layout = plan.architecture, plan.degrees, get_layout(plan)
    numel = 0
    for moe, layers in count_layers_by_kind(arch, stage):
        layer_numel = map_distinct(
            partial(_layer_matrices, arch, moe), degrees.tp, layout.expert_tp, degrees.ep
        )
        numel = numel + layers * layer_numel
    return count_operand_copies(plan.cluster.gpu) * numel


@lru_cache(maxsize=4096)
def _layer_matrices(arch: Architecture, moe: bool, tp: int, expert_tp: int, ep: int) -> int:
    """Return the elements of one layer's matmul weights on one rank, without the router's."""
    dense = sum(
        shape.rows * shape.columns
        for shape in list_rank_shapes(arch, moe, tp, ep)
        if shape.columns > 1 and shape.group not in ("experts", "router")
    )
    experts = sum(
        shape.copies * shape.rows * shape.columns
        for shape in list_rank_shapes(arch, moe, expert_tp, ep)
        if shape.columns > 1 and shape.group == "experts"
    )
    return dense + experts


def check_fp8(arch: Architecture, cluster: Cluster, recipe: Recipe, tokens: int, tp: int) -> None:
    """Raise ``ValueError`` for GPUs and tensor sizes that Transformer Engine's fp8 does not support.

    ``tokens``: tokens of one rank, in its shard of the sequence.
    """
    gpu = cluster.gpu
    if gpu.vendor != "nvidia" or "fp8" not in gpu.peak_flops:
        refuse(
            "Recipe.precision",
            recipe.precision,
            f"another on {gpu.name}: Transformer Engine's fp8 runs on NVIDIA's Ada, Hopper and Blackwell",
            {"precision": choose_mixed_precision(gpu)},
        )
    if tokens % _ROWS:
        refuse(
            "Recipe.seq_len",
            recipe.seq_len,
            f"such that a rank has a multiple of {_ROWS} tokens with fp8, not {tokens}",
            {"precision": "bf16-mixed"},
        )
    # Output sizes must be multiples too: the rows of a weight are the columns of the next matmul's input.
    inner = [arch.intermediate_size, get_attention_widths(arch).output]
    if arch.mixture_of_experts is not None:
        inner.append(arch.mixture_of_experts.moe_intermediate_size)
    if arch.hidden_size % _COLUMNS or any(size % (_COLUMNS * tp) for size in inner):
        refuse(
            "Layout.tp",
            tp,
            f"one that leaves multiples of {_COLUMNS} of {arch.name}'s widths "
            f"({', '.join(map(str, (arch.hidden_size, *inner)))}) with fp8",
            {"precision": "bf16-mixed"},
        )
