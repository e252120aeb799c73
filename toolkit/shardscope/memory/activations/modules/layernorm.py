"""A pre-norm LayerNorm layer of the transformers library: GPT-NeoX, Phi-2, Falcon, StarCoder 2, Nemotron."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.core.precision import FP32
from shardscope.families.parameter_names import names_of
from shardscope.families.registry import family_of
from shardscope.memory.activations.modules.attention import kernel_tensors, widths
from shardscope.memory.activations.modules.gpt2 import gelu_in_plain_operations
from shardscope.memory.activations.modules.saved import Modules, Saved, stream_readers

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture


def layernorm_layer(arch: Architecture, modules: Modules) -> list[Saved]:
    """Every tensor that the layer saves."""
    names = names_of(arch)
    return [
        *_norms(arch, modules),
        *kernel_tensors(arch, modules, output_projection=names.output),
        *_query_key_norms(arch, modules),
        Saved("mlp", inner_bytes(arch, modules) * arch.intermediate_size, "tp"),
    ]


def _norms(arch: Architecture, modules: Modules) -> list[Saved]:
    """Each norm's mean and 1/std, the streams that they read, and their outputs, which projections read."""
    hidden, number = arch.hidden_size, modules.normed
    attention, mlp = stream_readers(arch)
    if casts_norms(arch, modules):
        number = modules.compute
        copies = min(1, sum(map(modules.feeds, attention))) + min(1, sum(map(modules.feeds, mlp)))
    elif arch.norms_per_layer == 1:
        copies = modules.stream_copies(*attention, *mlp)
    else:
        copies = modules.stream_copies(*attention) + modules.stream_copies(*mlp)
    # Side by side both halves read the same stream, unless each upcasts it for itself.
    inputs = 1 if arch.parallel_residual else 2
    if modules.normed > modules.stream:
        inputs = arch.norms_per_layer
    saved = inputs * hidden * number + arch.norms_per_layer * statistics(modules)
    return [
        Saved("norms", saved, "sequence"),
        Saved("norms", copies * hidden * modules.compute, "whole"),
    ]


def statistics(modules: Modules) -> int:
    """Mean and 1/std of one row: fp32, but on a CPU in the type of its input."""
    return 2 * (FP32 if modules.on_gpu else modules.stream)


def norms_are_upcast(arch: Architecture) -> bool:
    """Whether the family's norms are ``layer_norm``, of which CUDA's autocast makes fp32."""
    return arch.norm == "layernorm" and not family_of(arch).has_layernorm_1p


def casts_norms(arch: Architecture, modules: Modules) -> bool:
    """Nemotron's LayerNorm1P casts its input itself, but asks for CUDA's autocast only."""
    return family_of(arch).has_layernorm_1p and modules.autocast and modules.on_gpu


def _query_key_norms(arch: Architecture, modules: Modules) -> list[Saved]:
    """Phi's optional norm of each head: what the projections put out."""
    if not arch.qk_norm:
        return []
    width, heads = widths(arch), arch.num_attention_heads + arch.num_key_value_heads
    # LayerNorm upcasts under CUDA's autocast.
    number = FP32 if modules.autocast and modules.on_gpu else modules.compute
    return [Saved("attention", (width.query + width.key) * number + heads * statistics(modules), "tp")]


def inner_bytes(arch: Architecture, modules: Modules) -> int:
    """Bytes for each number of the inner width: what the activation keeps, and the second product's input."""
    c, down = modules.compute, names_of(arch).down
    product = modules.inner_copies(down) * c
    family = family_of(arch)
    if family.activation == "gelu_new":
        return gelu_in_plain_operations(modules) + product
    if family.activation == "relu2" and modules.autocast and modules.on_gpu:
        # The squared ReLU: its result for ReLU, and upcast for the power.
        return c + FP32 + product
    if family.projections == "matmul" and arch.mlp_bias:
        return modules.stream + product  # the bias is added outside of autocast
    return c + product
