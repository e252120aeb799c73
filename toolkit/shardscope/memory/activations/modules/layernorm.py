"""Saved tensors of transformers' pre-norm LayerNorm layers.

The families are GPT-NeoX, Phi-2, Falcon, StarCoder 2 and Nemotron.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.core.precision import FP32
from shardscope.families.parameter_names import list_parameter_names
from shardscope.families.registry import find_family
from shardscope.memory.activations.modules.attention import get_attention_widths, list_kernel_tensors
from shardscope.memory.activations.modules.gpt2 import compute_unfused_gelu
from shardscope.memory.activations.modules.saved_tensors import Modules, SavedTensor, list_stream_readers

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture


def list_layernorm_tensors(arch: Architecture, modules: Modules) -> list[SavedTensor]:
    """Return every tensor that the layer saves."""
    names = list_parameter_names(arch)
    return [
        *_list_norms(arch, modules),
        *list_kernel_tensors(arch, modules, output_projection=names.output),
        *_list_query_key_norms(arch, modules),
        SavedTensor("mlp", compute_inner_bytes(arch, modules) * arch.intermediate_size, "tp"),
    ]


def _list_norms(arch: Architecture, modules: Modules) -> list[SavedTensor]:
    """Return each norm's mean and 1/std, its input, and its outputs, which are the projections' inputs."""
    hidden, number = arch.hidden_size, modules.normed
    attention, mlp = list_stream_readers(arch)
    if casts_norms(arch, modules):
        number = modules.compute
        # The output is narrow already: projections share it, unless peft casts it for each adapter.
        readers = (sum(map(modules.saves_input, names)) for names in (attention, mlp))
        copies = sum(num_readers if modules.recasts else min(1, num_readers) for num_readers in readers)
    elif arch.norms_per_layer == 1:
        copies = modules.stream_copies(*attention, *mlp)
    else:
        copies = modules.stream_copies(*attention) + modules.stream_copies(*mlp)
    # Parallel attention and MLP read the same stream, unless each upcasts it separately.
    inputs = 1 if arch.parallel_residual else 2
    if modules.normed > modules.stream:
        inputs = arch.norms_per_layer
    saved = inputs * hidden * number + arch.norms_per_layer * compute_norm_statistics(modules)
    return [
        SavedTensor("norms", saved, "sequence"),
        SavedTensor("norms", copies * hidden * modules.compute, "whole"),
    ]


def compute_norm_statistics(modules: Modules) -> int:
    """Return bytes of one row's mean and 1/std: fp32, but the input's dtype on a CPU."""
    return 2 * (FP32 if modules.on_gpu else modules.stream)


def upcasts_norms(arch: Architecture) -> bool:
    """Return whether the family's norms are ``layer_norm``, which CUDA's autocast runs in fp32."""
    return arch.norm == "layernorm" and not find_family(arch).has_layernorm_1p


def casts_norms(arch: Architecture, modules: Modules) -> bool:
    """Return whether norms cast their input: Nemotron's LayerNorm1P does, for CUDA's autocast only."""
    return find_family(arch).has_layernorm_1p and modules.autocast and modules.on_gpu


def _list_query_key_norms(arch: Architecture, modules: Modules) -> list[SavedTensor]:
    """Return the inputs of Phi's optional norm of each head: the projections' outputs."""
    if not arch.qk_norm:
        return []
    width, heads = get_attention_widths(arch), arch.num_attention_heads + arch.num_key_value_heads
    # LayerNorm upcasts under CUDA's autocast.
    number = FP32 if modules.autocast and modules.on_gpu else modules.compute
    return [
        SavedTensor(
            "attention", (width.query + width.key) * number + heads * compute_norm_statistics(modules), "tp"
        )
    ]


def compute_inner_bytes(arch: Architecture, modules: Modules) -> int:
    """Return bytes per intermediate element: tensors saved by the activation and by the down projection."""
    c, down = modules.compute, list_parameter_names(arch).down
    product = modules.inner_copies(down) * c
    family = find_family(arch)
    if family.activation == "gelu_new":
        return compute_unfused_gelu(modules) + product
    if family.activation == "relu2" and modules.autocast and modules.on_gpu:
        # The squared ReLU: ReLU's output, and its fp32 copy for the power.
        return c + FP32 + product
    if family.projections == "matmul" and arch.mlp_bias:
        return modules.stream + product  # the bias is added outside of autocast
    return c + product
