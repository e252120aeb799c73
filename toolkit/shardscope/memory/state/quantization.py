"""Frozen NF4 or int8 base under adapters, as stored by bitsandbytes and peft.

NF4 is Dettmers et al. 2023, section 3; int8 Dettmers et al. 2022 (LLM.int8). Every Linear inside the layers
is quantized; embeddings, norms, the head, routers and fused experts are not. Read from bitsandbytes 0.50
(``nn.Params4bit``, ``nn.Int8Params``, ``functional.quantize_4bit``, ``int8_vectorwise_quant``) and tested
against it in ``tests/unit/memory/test_quantization.py``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from shardscope.core.errors import refuse
from shardscope.core.ops import ceil_div, maximum
from shardscope.core.precision import FP32
from shardscope.families.parameter_shapes import find_first_layer
from shardscope.memory.state.stages import count_layers_by_kind

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.plan import Plan
    from shardscope.core.recipe import Recipe
    from shardscope.memory.state.stages import Stage

BLOCK = 64
"""Weights that share a scale."""
SCALE_BLOCK = 256
"""Scales that share a second-level scale, with double quantization."""
CODES = 16 * FP32
"""Bytes of the 16 values of the 4-bit code, once per tensor."""


def compute_nf4_bytes(numel: int, double: bool) -> int:
    """Return bytes of one matrix of ``numel`` weights: 4 bits each, and one scale per block.

    ``double``: scales are 8 bits each, with an fp32 scale per block of scales, one offset and a map of the
    256 values of the 8-bit code.
    """
    blocks = ceil_div(numel, BLOCK)
    # QuantState of nested scales: 8-bit codes, their fp32 scales, one fp32 offset and the fp32 code map.
    double_scales = blocks + FP32 * (ceil_div(blocks, SCALE_BLOCK) + 1 + 256)
    scales = double_scales if double else FP32 * blocks
    return ceil_div(numel, 2) + scales + CODES


def check_kernels(recipe: Recipe) -> None:
    """Raise ``ValueError`` for kernels whose layers were not measured over a quantized base."""
    counted = ("transformers",) if recipe.base_quantization == "int8" else ("transformers", "liger")
    if recipe.base_quantization is not None and recipe.kernels not in (None, *counted):
        refuse(
            "Recipe.kernels",
            recipe.kernels,
            f"None or {', '.join(map(repr, counted))} over a base in {recipe.base_quantization}",
            {"kernels": None},
        )


def compute_int8_bytes(rows: int, columns: int) -> int:
    """Return bytes of one int8 matrix: a byte per weight, and an fp32 scale per row."""
    return rows * columns + FP32 * rows


@lru_cache(maxsize=1024)
def measure_layer_linears(architecture: Architecture, moe: bool, kind: str) -> tuple[int, int, int]:
    """Return (weights, quantized bytes, weights of the largest matrix) of one layer's Linears.

    ``kind`` is "int8", "nf4", or "nf4_double" with scales that are quantized too.
    """
    shapes = [shape for _, shape in architecture.layer_linears(find_first_layer(architecture, moe))]
    sizes = [out * inner for out, inner in shapes]
    if kind == "int8":
        quantized = sum(compute_int8_bytes(*shape) for shape in shapes)
    else:
        quantized = sum(compute_nf4_bytes(size, kind == "nf4_double") for size in sizes)
    return sum(sizes), quantized, max(sizes)


def count_quantized(architecture: Architecture) -> int:
    """Return the number of weights that a quantized base stores quantized: those of the layers' Linears.

    Not those of fused experts, which transformers 5 keeps in one parameter for all experts of a layer.
    """
    linears = map(architecture.layer_linears, range(architecture.num_hidden_layers))
    return sum(out * inner for layer in linears for _, (out, inner) in layer)


def compute_frozen_base_bytes(plan: Plan, stage: Stage, width: int) -> int:
    """Return bytes of a stage's frozen weights: quantized Linears, and the rest at ``width`` bytes each."""
    # QLoRA quantizes the scales, too (Dettmers et al. 2023, section 3, "Double Quantization").
    kind = "nf4_double" if plan.recipe.method == "qlora" else str(plan.recipe.quantization)
    quantized = saved = 0
    for moe, layers in count_layers_by_kind(plan.architecture, stage):
        numel, num_bytes, _ = measure_layer_linears(plan.architecture, moe, kind)
        quantized += layers * num_bytes
        saved += layers * numel
    return quantized + width * (stage.base - saved)


def find_largest_matrix(architecture: Architecture, stage: Stage) -> int:
    """Return the number of weights of the largest quantized matrix, dequantized during its matmul."""
    # A number of weights, so it does not depend on the kind of quantization.
    return maximum(*(
        (layers > 0) * measure_layer_linears(architecture, moe, "nf4")[2]
        for moe, layers in count_layers_by_kind(architecture, stage)
    ))  # fmt: skip
