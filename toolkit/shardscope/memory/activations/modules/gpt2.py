"""Saved tensors of GPT-2's layer in transformers: LayerNorm, fused qkv projection, dropout, unfused gelu."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.core.precision import FP32
from shardscope.memory.activations.modules.attention import list_kernel_tensors
from shardscope.memory.activations.modules.saved_tensors import Modules, SavedTensor

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture


def list_gpt2_tensors(arch: Architecture, modules: Modules) -> list[SavedTensor]:
    """Return every tensor that the layer saves.

    Dropout's mask has a byte per element on a GPU, a full number on a CPU.
    """
    c, hidden = modules.compute, arch.hidden_size
    mask = (1 if modules.on_gpu else c) if modules.dropout else 0
    # LayerNorm's mean and 1/std: fp32, but the input's dtype on a CPU.
    statistics = 2 * (FP32 if modules.on_gpu else modules.stream)
    inputs = modules.stream_copies("c_attn") + modules.stream_copies("c_fc")
    return [
        SavedTensor("norms", 2 * (hidden * modules.normed + statistics) + inputs * hidden * c, "sequence"),
        *list_kernel_tensors(arch, modules, output_projection="c_proj"),
        SavedTensor("norms", 2 * hidden * mask, "sequence"),
        SavedTensor(
            "mlp",
            (compute_unfused_gelu(modules) + modules.inner_copies("c_proj") * c) * arch.intermediate_size,
            "tp",
        ),
    ]


def compute_unfused_gelu(modules: Modules) -> int:
    """Return bytes per element saved by the unfused gelu 0.5 x (1 + tanh(...x^3)).

    These are x for its power, 0.5 x, tanh, and 1 + tanh. CUDA's autocast computes powers in fp32.
    """
    if modules.autocast and modules.on_gpu:
        return 3 * FP32 + modules.compute
    return 4 * modules.compute
