"""fp8 as megatron-core has it from Transformer Engine: weights copied in 8 bits, and what it asks of sizes.

Its defaults: delayed scaling of whole tensors, E4M3 forward and E5M2 backward (``fp8="hybrid"``), weights
primarily in bf16 (``fp8_param=False``), attention in bf16; ``output_layer`` and routers too, for they are not
Transformer Engine's. Scales and histories of largest values are a few numbers a tensor and not counted. Read
from Transformer Engine 2.20 and megatron-core 0.16.1, and never run here.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from shardscope.core.arrays.arithmetic import looked_up
from shardscope.core.errors import refuse
from shardscope.memory.activations.modules.attention import widths
from shardscope.memory.state.stages import layers_by_kind, rank_shapes

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.cluster import Cluster, Gpu
    from shardscope.core.plan import Plan
    from shardscope.core.recipe import Recipe
    from shardscope.memory.state.stages import Stage

SOURCE = "read from Transformer Engine 2.20's source and never run here"

_ROWS, _COLUMNS = 8, 16
"""What the sizes of every operand are multiples of (``pytorch/utils.py``, ``assert_dim_for_fp8_exec``)."""


def copies(gpu: Gpu) -> int:
    """8-bit copies of an operand that more than one product reads: itself, and its transpose.

    Data-centre Blackwell multiplies in any order and has no need of transposes (``pytorch/utils.py``,
    ``is_non_tn_fp8_gemm_supported``: compute capability 10, not 12, which is that of RTX cards).
    """
    return 1 if (gpu.architecture or "").startswith("blackwell") and not gpu.name.startswith("rtx") else 2


def gradient_copies(plan: Plan) -> int:
    """The same of a gradient, which a product's both gradients read; 0 without fp8."""
    return copies(plan.cluster.gpu) if plan.recipe.precision == "fp8-mixed" else 0


def weight_copies(plan: Plan, stage: Stage) -> Any:
    """Bytes of a stage's cached 8-bit weights: kept from the first micro-batch on, over steps.

    ``quantize_weight`` (``pytorch/module/base.py``) fills them anew at each step's first micro-batch;
    megatron-core's ``disable_parameter_transpose_cache`` is off.
    """
    if plan.recipe.precision != "fp8-mixed":
        return 0
    arch, degrees, layout = plan.architecture, plan.degrees, plan.layout
    numel: Any = 0
    for moe, layers in layers_by_kind(arch, stage):
        each = looked_up(
            lambda tp, expert_tp, ep, moe=moe: _layer_matrices(arch, moe, tp, expert_tp, ep),
            degrees.tp,
            layout.expert_tp,  # type: ignore[attr-defined]
            degrees.ep,
        )
        numel = numel + layers * each
    return copies(plan.cluster.gpu) * numel


@lru_cache(maxsize=4096)
def _layer_matrices(arch: Architecture, moe: bool, tp: int, expert_tp: int, ep: int) -> int:
    """Weights of one layer's products on one rank, but the router's."""
    dense = sum(
        shape.rows * shape.columns
        for shape in rank_shapes(arch, moe, tp, ep)
        if shape.columns > 1 and shape.group not in ("experts", "router")
    )
    experts = sum(
        shape.copies * shape.rows * shape.columns
        for shape in rank_shapes(arch, moe, expert_tp, ep)
        if shape.columns > 1 and shape.group == "experts"
    )
    return dense + experts


def check_fp8(arch: Architecture, cluster: Cluster, recipe: Recipe, tokens: int, tp: int) -> None:
    """Refuse what Transformer Engine would: other GPUs, and sizes that 8-bit products cannot take.

    ``tokens`` are those of one rank, of its part of the sequence.
    """
    gpu = cluster.gpu
    if gpu.vendor != "nvidia" or "fp8" not in gpu.peak_flops:
        refuse(
            "Recipe.precision",
            recipe.precision,
            f"another on {gpu.name}: Transformer Engine's fp8 runs on NVIDIA's Ada, Hopper and Blackwell",
            {"precision": "bf16-mixed"},
        )
    if tokens % _ROWS:
        refuse(
            "Recipe.seq_len",
            recipe.seq_len,
            f"such that a rank has a multiple of {_ROWS} tokens with fp8, not {tokens}",
            {"precision": "bf16-mixed"},
        )
    # Inputs and outputs are each other's columns: rows of a weight are columns of the next product's input.
    inner = [arch.intermediate_size, widths(arch).output]
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
