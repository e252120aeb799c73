"""Host memory while a model is built or loaded, before it moves to its device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.core.number_format import format_count, format_gib
from shardscope.core.precision import FP32, widths
from shardscope.memory.report import Term, zero_term
from shardscope.memory.state.lora import count_adapter_parameters
from shardscope.memory.state.quantization import compute_frozen_base_bytes
from shardscope.memory.state.stages import count_stage_weights, find_stage_shapes

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

HOST_BUILD_BYTES = 2**30
"""Randomly initialized models up to this fp32 size are built whole on every rank, with the same weights as
with DDP. For larger ones, each rank that keeps a shard initializes only that shard. Checkpoints are loaded
whole, whatever their size."""


_PACKING_BYTES = 12
"""Bytes per element while a matrix is quantized: in fp32, scaled, and clamped or as code indices
(bitsandbytes 0.50, backends/default/ops.py, ``quantize_4bit``; int8 takes less)."""


def is_initialized_sharded(plan: Plan) -> bool:
    """Return whether random weights are too large to be initialized whole (see ``HOST_BUILD_BYTES``)."""
    # In fp32 whatever the recipe's precision: models are built in fp32, then cast.
    return FP32 * plan.architecture.num_parameters > HOST_BUILD_BYTES


def compute_fp32_model(plan: Plan, num_parameters: int, where: str) -> Term:
    """Return host bytes of ``num_parameters`` and their adapters in fp32, as transformers builds them.

    The same if every rank loads a checkpoint: safetensors maps the file, whose pages are page cache and no
    rank's memory. CPU ranks train the model in place, which adds nothing.
    """
    if not plan.on_gpu:
        return zero_term("CPU ranks train the model in the memory in which it was built")
    built = num_parameters + count_adapter_parameters(plan.architecture, plan.recipe)
    return Term(
        FP32 * built,
        lambda: f"{format_count(built, 'parameter')} × 4 bytes = {format_gib(FP32 * built)} GiB {where}",
    )


def compute_quantized_model(plan: Plan, where: str) -> Term:
    """Return host bytes of a quantized base, its adapters, and the largest matrix while it is quantized.

    transformers' ``from_pretrained`` with a ``BitsAndBytesConfig`` works matrix by matrix too.
    """
    if not plan.on_gpu:
        return zero_term("CPU ranks train the model in the memory in which it was built")
    # The whole model as one stage, though the plan may shard it: every rank builds all of it.
    (model,) = find_stage_shapes(plan.architecture, (plan.architecture.num_hidden_layers,)).kinds
    base = compute_frozen_base_bytes(
        plan, count_stage_weights(plan, model), widths[plan.recipe.precision].compute
    )
    adapters = FP32 * count_adapter_parameters(plan.architecture, plan.recipe)
    # Its own weights, and the temporary tensors of its quantization.
    largest = (widths[plan.recipe.precision].compute + _PACKING_BYTES) * _find_largest_linear(plan)
    return Term(
        base + adapters + largest,
        lambda: (
            f"{format_gib(base)} GiB of frozen weights as they are packed + {format_gib(adapters)} GiB "
            f"adapters + {format_gib(largest)} GiB while the largest matrix is packed, {where}"
        ),
    )


def _find_largest_linear(plan: Plan) -> int:
    arch = plan.architecture
    # A model with both kinds of layers has a dense one first and one with routed experts last.
    layers = {0, arch.num_hidden_layers - 1}
    return max(out * inner for layer in layers for _, (out, inner) in arch.layer_linears(layer))
