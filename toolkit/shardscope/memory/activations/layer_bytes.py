"""Bytes of one decoder layer on one rank: saved tensors, and peak candidates of forward and backward."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.ops import ceil_div, map_distinct, maximum
from shardscope.memory.activations.float8 import compute_layer_working
from shardscope.memory.activations.forward import LayerActivations, compute_kept_for_recomputation
from shardscope.memory.activations.modules.dora import compute_dora_peaks, compute_dora_vectors
from shardscope.memory.activations.modules.layer_forward import LayerPeak
from shardscope.memory.activations.modules.layer_peaks import compute_layer_peaks
from shardscope.memory.activations.weight_casts import (
    compute_passing_cast,
    compute_weight_casts,
    count_weight_casts,
)

if TYPE_CHECKING:
    from shardscope.memory.activations.modules.saved_tensors import Modules
    from shardscope.memory.activations.rank_activations import RankActivations


class LayerBytes(NamedTuple):
    """Bytes of one layer and micro-batch."""

    saved: int
    """Saved for backward by one layer."""
    forward: int
    """Maximum of one layer during its forward, without a dequantized matrix."""
    backward: tuple[LayerPeak, ...]
    """Peak candidates during the layer's backward; their ``activations`` are bytes, not bytes per token."""
    recomputation: int
    """Maximum while backward recomputes the layer; 0 if it does not. Among ``backward``, too."""
    casts: int
    """Autocast's half-precision copies of its matrices, made again if the layer is recomputed."""
    casts_after_forward: int
    """Such copies alive after the layer's forward."""
    casts_in_backward: int
    """Such copies that autograd keeps for backward."""
    weights: int
    """Number of weights with gradients in one layer."""


def compute_layer_bytes(
    rank: RankActivations, moe: bool, recompute: str, modules: Modules, layer: LayerActivations
) -> LayerBytes:
    """Return the bytes of a layer of ``modules``, dense or with routed experts, that saves ``layer``."""
    plan, tokens, num_stream_shards = rank.plan, rank.tokens, rank.num_stream_shards
    arch = plan.architecture
    peaks = map_distinct(
        partial(compute_layer_peaks, arch, moe, modules, recompute), plan.degrees.tp, num_stream_shards
    )
    # A quantized base's matrix is dequantized in its matmul's backward, whose weight count each peak has; and
    # an offloaded copy of autocast returns from the host for it.
    returns_casts = recompute == "offload" and modules.on_gpu and modules.autocast and modules.trained
    matrix_width = modules.compute * (modules.quantized or returns_casts)
    backward = [
        LayerPeak(
            tokens * activations + matrix_width * in_matmul,
            finished,
            matrix,
            experts,
            0 if returns_casts else casts,
        )
        for activations, finished, matrix, experts, casts, in_matmul in peaks.backward
    ]
    forward = tokens * peaks.forward
    if modules.uses_dora:
        stream = arch.hidden_size * modules.stream
        kept_inputs = compute_kept_for_recomputation(arch, moe, modules, recompute, stream)
        in_forward, in_backward = compute_dora_peaks(arch, modules, recompute, tokens, kept_inputs)
        forward = maximum(forward, in_forward)
        backward = [LayerPeak(num_bytes) for num_bytes in in_backward]
    # The casts to 8 bits inside of one Linear's backward are a candidate of their own.
    if plan.recipe.precision == "fp8-mixed":
        stream = ceil_div(arch.hidden_size * modules.stream, num_stream_shards)
        saved = tokens * (layer.saved + layer.recomputed + stream)
        backward.append(LayerPeak(saved + compute_layer_working(arch, moe, tokens)))
    casts = compute_weight_casts(arch, moe, modules)
    copies, kept_copies = count_weight_casts(arch, modules, recompute)
    return LayerBytes(
        saved=tokens * layer.saved + compute_dora_vectors(arch, modules, recompute),
        forward=forward + compute_passing_cast(arch, moe, modules, recompute),
        backward=tuple(backward),
        # DoRA's own candidates have it among them.
        recomputation=0 if modules.uses_dora else tokens * peaks.recomputation,
        casts=0 if returns_casts else casts,
        casts_after_forward=copies * casts,
        casts_in_backward=kept_copies * casts,
        weights=peaks.weights,
    )
