"""A frozen base in NF4 under adapters, as bitsandbytes and peft keep it (Dettmers et al. 2023, section 3).

Every Linear inside the layers is quantised; embeddings, norms, the head, routers and fused experts are not.
Read off bitsandbytes 0.50 (``nn.Params4bit``, ``functional.quantize_4bit``) and counted against it in
``tests/unit/test_quantization.py``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from shardscope.memory.arithmetic import ceil_div, largest
from shardscope.memory.lora import first_layer
from shardscope.memory.precision import FP32
from shardscope.memory.stages import layers_by_kind

if TYPE_CHECKING:
    from shardscope.architecture import Architecture
    from shardscope.memory.stages import Stage
    from shardscope.plan import Plan

BLOCK = 64
"""Weights that share a scale."""
SCALE_BLOCK = 256
"""Scales that share a scale of their own, where they are quantised too."""
CODES = 16 * FP32
"""The sixteen numbers that four bits stand for, once a tensor."""


def nf4_bytes(numel: Any, double: bool) -> Any:
    """Bytes of one matrix of ``numel`` weights: 4 bits each, and a scale a block.

    ``double``: the scales are 8 bits each, with an fp32 scale of their own a block, one offset and a map of
    the 256 numbers that 8 bits stand for.
    """
    blocks = ceil_div(numel, BLOCK)
    double_scales = blocks + FP32 * (ceil_div(blocks, SCALE_BLOCK) + 1 + 256)
    scales = double_scales if double else FP32 * blocks
    return ceil_div(numel, 2) + scales + CODES


@lru_cache(maxsize=1024)
def layer_linears(architecture: Architecture, moe: bool, double: bool) -> tuple[int, int, int]:
    """(weights, bytes once quantised, weights of the largest) of the Linears of one layer."""
    sizes = [out * inner for _, (out, inner) in architecture.layer_linears(first_layer(architecture, moe))]
    return sum(sizes), sum(nf4_bytes(size, double) for size in sizes), max(sizes)


def frozen_base_bytes(plan: Plan, stage: Stage, width: int) -> int:
    """Bytes of a stage's frozen weights: quantised Linears, and the rest at ``width`` bytes each."""
    quantised = saved = 0
    for moe, layers in layers_by_kind(plan.architecture, stage):
        numel, num_bytes, _ = layer_linears(plan.architecture, moe, plan.recipe.method == "qlora")
        quantised += layers * num_bytes
        saved += layers * numel
    return quantised + width * (stage.base - saved)


def largest_matrix(architecture: Architecture, stage: Stage) -> int:
    """Weights of the largest quantised matrix, which a product makes whole for as long as it takes."""
    found: int = largest(*(
        (layers > 0) * layer_linears(architecture, moe, True)[2]
        for moe, layers in layers_by_kind(architecture, stage)
    ))  # fmt: skip
    return found
