"""Saved tensors of transformers' decoder layers compiled one by one (``layer.compile()``, as in torchtitan).

A minimum cut between forward and backward decides what a compiled layer saves
(``torch/_functorch/partitioners.py``, ``min_cut_rematerialization_partition``): inputs and outputs of matmuls
and attention are saved; chains of pointwise operators between them are recomputed inside backward's fused
kernels, and so are norms, except their row statistics. Read from graphs partitioned by inductor, with CUDA's
operators too (tests/runs/test_compiled_layers.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.core.precision import FP32
from shardscope.families.registry import find_family, list_families_with
from shardscope.memory.activations.modules.attention import get_attention_widths, list_kernel_tensors
from shardscope.memory.activations.modules.saved_tensors import Modules, SavedTensor, list_stream_readers

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture

COMPILED_FAMILIES = list_families_with("compiled_layers")
"""Families whose compiled layers were measured: RMSNorm, a gated MLP, SDPA.

Phi-3 is excluded: its saved tensors depend on the rotated part of a head, which an ``Architecture`` does not
have: with full rotation, the ``cat`` after it is compiled away."""


def list_compiled_tensors(arch: Architecture, modules: Modules) -> list[SavedTensor]:
    """Return every tensor that the layer saves."""
    c, hidden = modules.compute, arch.hidden_size
    return [
        SavedTensor("norms", _compute_norms(arch, modules), "sequence"),
        *list_kernel_tensors(arch, modules),
        *_list_query_key_norms(arch, modules),
        # Attention's output: with the layer's input it gives the residual stream, the input of the MLP's
        # norm.
        SavedTensor("norms", hidden * c, "sequence"),
        # Both branches and, for the down projection, their product.
        SavedTensor("mlp", (2 + modules.inner_copies("down_proj")) * arch.intermediate_size * c, "tp"),
    ]


def _compute_norms(arch: Architecture, modules: Modules) -> int:
    """Return bytes of the layer's input, each norm's 1/rms, and its output, shared by all projections.

    Norms after the MLP read its output. OLMo 2 has only such norms: its projections read the residual stream.
    """
    c, hidden = modules.compute, arch.hidden_size
    attention, mlp = (any(map(modules.saves_input, readers)) for readers in list_stream_readers(arch))
    normed = (attention + mlp) * hidden * c
    saved = arch.norms_per_layer * FP32 + normed
    if find_family(arch).is_post_norm:
        return saved + hidden * c
    behind = arch.norms_per_layer > 2
    return saved + hidden * (modules.stream + behind * c)


def _list_query_key_norms(arch: Architecture, modules: Modules) -> list[SavedTensor]:
    """Return the projections' outputs and 1/rms per head (OLMo 2: over all heads together)."""
    if not arch.qk_norm:
        return []
    width, heads = get_attention_widths(arch), arch.num_attention_heads + arch.num_key_value_heads
    statistics = FP32 * (2 if find_family(arch).qk_norm_over_all_heads else heads)
    return [SavedTensor("attention", (width.query + width.key) * modules.compute + statistics, "tp")]


def compute_unsaved_in_first_compiled_layer(arch: Architecture, modules: Modules) -> int:
    """Return bytes per token not saved in the first layer under adapters, whose input needs no gradient.

    Without norms after the blocks, the residual stream between attention and MLP is saved instead of
    attention's output.
    """
    if find_family(arch).is_post_norm:
        return 0
    return FP32 + (arch.hidden_size * modules.compute if arch.norms_per_layer == 2 else 0)


def compute_compiled_recomputation(arch: Architecture, modules: Modules) -> int:
    """Return bytes per token of a recomputed layer's backward, on top of its saved tensors.

    One kernel then computes the product and both branches' gradients from the branches. Each branch is read
    twice, so none is overwritten: two intermediate-size tensors more than without recomputation.
    """
    return 2 * arch.intermediate_size * modules.compute * modules.saves_input("down_proj")
