"""transformers' decoder layers, each of them compiled by itself (``layer.compile()``, as torchtitan does).

What a compiled layer keeps is decided by a minimum cut between its forward and its backward
(``torch/_functorch/partitioners.py``, ``min_cut_rematerialization_partition``): what a matrix product or
attention reads or makes stays; chains of pointwise operators between them are computed again inside
backward's own kernels, and so is a norm, but for its row statistics. Read off graphs that inductor itself
cut, with CUDA's operators too (tests/runs/test_compiled_layers.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.core.precision import FP32
from shardscope.families.registry import families_with, family_of
from shardscope.memory.activations.modules.attention import kernel_tensors, widths
from shardscope.memory.activations.modules.saved import Modules, Saved, stream_readers

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture

COMPILED_FAMILIES = families_with("compiled_layers")
"""Families whose compiled layers were counted: RMSNorm, a gated MLP, SDPA.

Not Phi-3: it depends on how much of a head is rotated, which an ``Architecture`` does not say, for without a
rest the ``cat`` behind it is compiled away.
"""


def compiled_layer(arch: Architecture, modules: Modules) -> list[Saved]:
    """Every tensor that the layer saves."""
    c, hidden = modules.compute, arch.hidden_size
    return [
        Saved("norms", _norms(arch, modules), "sequence"),
        *kernel_tensors(arch, modules),
        *_query_key_norms(arch, modules),
        # What attention puts out: with the layer's input it makes the stream that the MLP's norm reads.
        Saved("norms", hidden * c, "sequence"),
        # Both branches and, for the last projection, their product.
        Saved("mlp", (2 + modules.inner_copies("down_proj")) * arch.intermediate_size * c, "tp"),
    ]


def _norms(arch: Architecture, modules: Modules) -> int:
    """The layer's input, 1/rms of each norm, and its output once for all projections that read it.

    Norms behind the MLP read what it puts out. OLMo 2 has no others: its projections read the stream.
    """
    c, hidden = modules.compute, arch.hidden_size
    attention, mlp = (any(map(modules.feeds, readers)) for readers in stream_readers(arch))
    normed = (attention + mlp) * hidden * c
    saved = arch.norms_per_layer * FP32 + normed
    if family_of(arch).is_post_norm:
        return saved + hidden * c
    behind = arch.norms_per_layer > 2
    return saved + hidden * (modules.stream + behind * c)


def _query_key_norms(arch: Architecture, modules: Modules) -> list[Saved]:
    """What the projections put out, and 1/rms of each head; OLMo 2 normalises all heads together."""
    if not arch.qk_norm:
        return []
    width, heads = widths(arch), arch.num_attention_heads + arch.num_key_value_heads
    statistics = FP32 * (2 if family_of(arch).qk_norm_over_all_heads else heads)
    return [Saved("attention", (width.query + width.key) * modules.compute + statistics, "tp")]


def unsaved_in_first_compiled_layer(arch: Architecture, modules: Modules) -> int:
    """Bytes a token does not leave in the first layer under adapters, whose input needs no gradient.

    Without norms behind, the stream between attention and the MLP stays instead of attention's output.
    """
    if family_of(arch).is_post_norm:
        return 0
    return FP32 + (arch.hidden_size * modules.compute if arch.norms_per_layer == 2 else 0)


def compiled_again(arch: Architecture, modules: Modules) -> int:
    """Bytes a token takes in a layer that its backward computes again, beside all that it would have kept.

    One kernel then makes the product and both branches' gradients from the branches, each read twice, so that
    none is written over: two inner widths more than a layer needs that kept its own.
    """
    return 2 * arch.intermediate_size * modules.compute * modules.feeds("down_proj")
