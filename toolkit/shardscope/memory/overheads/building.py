"""What making or loading a model takes of host memory, before it is where it trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.core.number_format import count, gib
from shardscope.core.precision import FP32, widths
from shardscope.memory.report import Term, no_bytes
from shardscope.memory.state.lora import layer_adapters
from shardscope.memory.state.quantization import frozen_base_bytes
from shardscope.memory.state.stages import shapes_of, stage_of

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

HOST_BUILD_BYTES = 2**30
"""Fresh models up to this size in fp32 are made whole on every rank, with DDP's weights; of larger ones ranks
that keep a part draw no more than that. A model with weights of its own is made whole whatever its size."""


_PACKING_BYTES = 12
"""Of each number of a matrix while it is packed: in fp32, scaled, and scaled within bounds or its places in
the code (bitsandbytes 0.50, backends/default/ops.py, ``quantize_4bit``; what int8 takes is less)."""


def is_drawn_in_parts(plan: Plan) -> bool:
    """Whether fresh weights are too many for that."""
    return FP32 * plan.architecture.num_parameters > HOST_BUILD_BYTES


def in_fp32(plan: Plan, num_parameters: int, where: str) -> Term:
    """``num_parameters`` and their adapters as transformers makes them, cast tensor by tensor if at all.

    The same where every rank loads a checkpoint, whose own pages are the file's cache and no rank's
    (safetensors maps the file). CPU ranks train the model where they made it: nothing comes on top.
    """
    if not plan.on_gpu:
        return no_bytes("CPU ranks train the model where they made it")
    made = num_parameters + _adapters(plan)
    return Term(FP32 * made, lambda: f"{count(made, 'parameter')} × 4 bytes = {gib(FP32 * made)} GiB {where}")


def packed(plan: Plan, where: str) -> Term:
    """A base in few bits and its adapters, and the largest matrix as it is read or drawn, and packed.

    transformers' ``from_pretrained`` with a ``BitsAndBytesConfig`` goes matrix by matrix too.
    """
    if not plan.on_gpu:
        return no_bytes("CPU ranks train the model where they made it")
    (whole,) = shapes_of(plan.architecture, (plan.architecture.num_hidden_layers,)).kinds
    base = frozen_base_bytes(plan, stage_of(plan, whole), widths[plan.recipe.precision].compute)
    adapters = FP32 * _adapters(plan)
    one = (widths[plan.recipe.precision].compute + _PACKING_BYTES) * _largest_linear(plan)
    return Term(
        base + adapters + one,
        lambda: (
            f"{gib(base)} GiB of frozen weights as they are packed + {gib(adapters)} GiB adapters + "
            f"{gib(one)} GiB while the largest matrix is packed, {where}"
        ),
    )


def _largest_linear(plan: Plan) -> int:
    arch = plan.architecture
    layers = {0, arch.num_hidden_layers - 1}
    return max(out * inner for layer in layers for _, (out, inner) in arch.layer_linears(layer))


def _adapters(plan: Plan) -> int:
    arch = plan.architecture
    if not plan.recipe.has_adapters:
        return 0
    kinds = ((False, arch.num_hidden_layers - arch.num_moe_layers), (True, arch.num_moe_layers))
    return sum(layers * layer_adapters(arch, plan.recipe, moe)[0] for moe, layers in kinds if layers)
