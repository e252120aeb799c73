"""Peak of backward in a stage's largest layer, for frameworks that use one layer for all (DeepSpeed's ZeRO).

Derived from the operators, as rehearsals record them. Autograd frees the saved tensors of a layer one by one,
so the peak inside a layer is the backward of the feed-forward's product (gate times up). The peak of the step
is in the first layers of backward, or in the last one if unsharded gradients accumulate.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.ops import ceil_div, is_array, maximum, minimum, where
from shardscope.core.precision import FP32
from shardscope.families.parameter_names import list_parameter_names
from shardscope.families.registry import find_family
from shardscope.memory.activations.float8 import compute_layer_working
from shardscope.memory.activations.forward import count_inner_gradients, count_mlp_copies
from shardscope.memory.activations.head import compute_norm_after_block, compute_norm_after_saved
from shardscope.memory.activations.modules.attention import (
    compute_saved_scores,
    compute_scores_in_backward,
    get_attention_widths,
    has_one_key_head,
    is_eager,
)
from shardscope.memory.activations.modules.experts import (
    compute_shared_saved,
    compute_weighting,
    get_expert_row_widths,
    list_expert_tensors,
)
from shardscope.memory.activations.modules.saved_tensors import list_stream_readers
from shardscope.memory.state.stages import count_layers_by_kind

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.memory.activations.forward import LayerActivations
    from shardscope.memory.activations.modules.saved_tensors import Modules
    from shardscope.memory.activations.stage_activations import LayersOfKind, TransformersActivations


class LayerBackward(NamedTuple):
    """Bytes per token in one layer's backward, on top of all saved activations."""

    at_product: int
    """At the backward of the feed-forward's product: the gradients of the residual stream, of the product and
    of its two factors, less the saved product."""
    stream_gradient: int
    """Gradient of the residual stream."""
    at_expert_weights: int
    """At the gradient of the routed experts' first matrices, when all expert gradients exist, less the
    experts' saved tensors. Equals ``at_product`` in a dense layer."""
    at_expert_rows: int
    """At the weighting of the experts' rows, before any expert weight has a gradient. Equals ``at_product``
    in a dense layer."""
    at_scores: int
    """At attention's scores, after the feed-forward's backward, less what it has freed; 0 if scores are not
    materialized."""
    freed_rows: int
    """Freed by then, too: tensors as wide as the residual stream, which tensor parallelism does not shard."""


class LargestLayer(NamedTuple):
    """The layer with the largest backward peak. Bytes on one rank, one micro-batch."""

    saved: int
    """Its saved activations."""
    at_product: int
    """At the feed-forward's product, on top of ``saved``, recomputed activations included."""
    at_expert_weights: int
    """The same when all routed experts' gradients exist; equals ``at_product`` in a dense layer."""
    at_expert_rows: int
    """The same at the weighting of experts' rows, before any gradient; equals ``at_product`` in a dense
    layer."""
    at_scores: int
    """The same at attention's scores, after the feed-forward's backward; 0 if attention is fused."""
    at_norm_after: int
    """The same at a norm after the feed-forward, whose backward is the layer's first; 0 if there is none."""
    recomputed: int
    """Recomputed activations among these; 0 if this layer is not recomputed."""
    most_recomputed: int
    """Recomputed activations of the layer kind with the most."""


def list_candidate_depths(deepest: int) -> list[int]:
    """Return the numbers of layers that backward has passed at its peak candidates: 0, 1 and ``deepest``."""
    depths = [0, minimum(1, deepest), deepest]
    return depths if is_array(deepest) else sorted(set(depths))


def find_largest_layer(stage: TransformersActivations, windowed: bool | None = None) -> LargestLayer:
    """Return the stage's layer with the most activations, and its bytes in backward.

    ``windowed``: only layers with a sliding window, or without one; None: any.
    """
    arch, modules, tokens = stage.plan.architecture, stage.modules.with_window(windowed), stage.tokens
    kinds = stage.kinds if windowed is None else stage.list_kinds(modules)
    layer, tp = _find_most_activations(kinds), stage.plan.degrees.tp
    # Layers with experts come last, and so first in backward.
    ends_in_experts = count_layers_by_kind(arch, stage.stage)[-1][0]
    is_recomputed = stage.plan.recipe.recompute in ("full", "selective")
    peak = compute_layer_backward(arch, ends_in_experts, modules, is_recomputed)
    if 0 < arch.num_moe_layers < arch.num_hidden_layers:
        has_experts = stage.stage.num_moe_layers > 0
        peak = where(has_experts, peak, compute_layer_backward(arch, False, modules))
    dequantized, float8 = stage.compute_dequantized(), _compute_float8(stage)

    def compute_on_rank(num_bytes: int) -> int:
        # tp shards the stream only if the sequence is split.
        stream = ceil_div(peak.stream_gradient, stage.num_stream_shards)
        rest = ceil_div(num_bytes - peak.stream_gradient, tp)
        return tokens * (stream + rest + layer.recomputed) + dequantized

    return LargestLayer(
        saved=tokens * layer.saved,
        at_product=maximum(
            compute_on_rank(peak.at_product),
            _compute_all_gathered(stage, peak.stream_gradient, layer.recomputed),
            (float8 > 0) * (tokens * (peak.stream_gradient + layer.recomputed) + float8),
        ),
        at_expert_weights=compute_on_rank(peak.at_expert_weights),
        at_expert_rows=compute_on_rank(peak.at_expert_rows),
        at_scores=where(
            peak.at_scores == 0,
            0,
            compute_on_rank(peak.at_scores) - tokens * ceil_div(peak.freed_rows, stage.num_stream_shards),
        ),
        at_norm_after=_compute_at_norm_after(stage, layer.recomputed),
        recomputed=tokens * layer.recomputed,
        most_recomputed=tokens * maximum(*(kind.activations.recomputed for kind in kinds)),
    )


def _compute_at_norm_after(stage: TransformersActivations, recomputed: int) -> int:
    norm = compute_norm_after_block(stage.plan.architecture, stage.modules)
    if not norm:
        return 0
    stream = stage.plan.architecture.hidden_size * stage.modules.stream
    return stage.tokens * (ceil_div(stream + norm, stage.num_stream_shards) + recomputed)


def _find_most_activations(kinds: list[LayersOfKind]) -> LayerActivations:
    """Return the layer with the most saved and recomputed activations."""
    # Elementwise over arrays of plans, in which a stage may have no layer of a kind.
    largest = kinds[0]
    for kind in kinds[1:]:
        layer, other = kind.activations, largest.activations
        is_larger = layer.saved + layer.recomputed > other.saved + other.recomputed
        is_chosen = (kind.num_layers > 0) & (is_larger | (largest.num_layers == 0))
        largest = where(is_chosen, kind, largest)
    return largest.activations


def _compute_all_gathered(stage: TransformersActivations, stream_gradient: int, recomputed: int) -> int:
    """Return bytes at a layer's last matmul with a split sequence.

    These are its all-gathered output gradient and its input's gradient.
    """
    arch, width, tp = stage.plan.architecture, stage.modules.compute, stage.plan.degrees.tp
    gathered = arch.hidden_size * width + ceil_div(arch.intermediate_size * width, tp)
    stream = ceil_div(stream_gradient, stage.num_stream_shards)
    return (stage.num_stream_shards > 1) * stage.tokens * (stream + gathered + recomputed)


def _compute_float8(stage: TransformersActivations) -> int:
    """Return bytes of casts to 8 bits during one matmul's backward."""
    if stage.plan.recipe.precision != "fp8-mixed":
        return 0
    working = 0
    for moe, num_layers in count_layers_by_kind(stage.plan.architecture, stage.stage):
        # Layers with experts come last, and so first in backward.
        layer = compute_layer_working(stage.plan.architecture, moe, stage.tokens)
        working = where(num_layers > 0, layer, working)
    return working


@lru_cache(maxsize=4096)
def compute_layer_backward(
    arch: Architecture, moe: bool, modules: Modules, is_recomputed: bool = False
) -> LayerBackward:
    """Return the bytes of one layer's backward, dense or MoE, for its attention implementation."""
    c, hidden = modules.compute, arch.hidden_size
    stream = hidden * modules.stream
    experts = arch.mixture_of_experts
    if moe and experts is not None:
        rows = experts.num_experts_per_tok
        width = get_expert_row_widths(arch, modules)[0]
        weighted = compute_weighting(arch, modules, is_recomputed=is_recomputed)
        if not find_family(arch).has_shared_expert_gate:
            weighted -= compute_shared_saved(arch, modules)
        inner = rows * experts.moe_intermediate_size * width * (2 if modules.trained else 3)
        saved = sum(t.bytes_per_token for t in list_expert_tensors(arch, modules) if t.operator == "experts")
        both = rows * width * (2 * experts.moe_intermediate_size + hidden)
        at_product = stream + inner - rows * hidden * width
        # After the backward of the experts and their norm, eager attention may need more.
        scores = _compute_score_gradients(arch, modules)
        at_scores = stream + scores - saved if scores else 0
        freed_rows = hidden * (2 * FP32 + 2 * c) if scores else 0
        return LayerBackward(
            at_product, stream, stream + both - saved, stream + weighted, at_scores, freed_rows
        )
    inner = arch.intermediate_size * (
        c * count_inner_gradients(arch, modules) - compute_dropped_mask(arch, modules)
    )
    # A norm after the feed-forward has had its backward.
    inner -= compute_norm_after_saved(arch, modules)
    at_product = stream + inner
    return LayerBackward(
        at_product, stream, at_product, at_product, *_compute_dense_scores(arch, modules, stream)
    )


def compute_dropped_mask(arch: Architecture, modules: Modules) -> int:
    """Return bytes per element of the down projection's adapter dropout mask, which is freed by then."""
    return int(
        modules.adapter_dropout
        and modules.on_gpu
        and list_parameter_names(arch).down in (modules.targets or ())
    )


def _compute_dense_scores(arch: Architecture, modules: Modules, stream: int) -> tuple[int, int]:
    """Return the bytes of unfused attention's backward in a dense layer: gradients of probabilities, softmax
    and soft cap, and of the stream, less what the feed-forward has freed, without rows as wide as the stream;
    and these rows. Both are 0 for a fused kernel."""
    scores = _compute_score_gradients(arch, modules)
    if not scores:
        return 0, 0
    if has_one_key_head(arch):
        # Falcon's feed-forward is parallel to attention, and reads the same norm's output.
        branches = 1 + modules.inner_copies("dense_4h_to_h")
        return stream + scores - branches * arch.intermediate_size * modules.compute, 0
    freed, freed_rows = _compute_freed_after_attention(arch, modules)
    return stream + scores - freed, freed_rows


def _compute_score_gradients(arch: Architecture, modules: Modules) -> int:
    """Return bytes per token of the gradients of attention scores alive at once; 0 for a fused kernel."""
    if not compute_saved_scores(arch, modules):
        return 0
    num_scores = arch.num_attention_heads * modules.seq_len
    if find_family(arch).has_attention_sinks or is_eager(arch, modules):
        return compute_scores_in_backward(arch, modules, num_scores)
    # The dropped probabilities are freed once their gradient exists, and make room for the softmax's.
    return num_scores * FP32 * (1 if modules.dropout else 2)


def _compute_freed_after_attention(arch: Architecture, modules: Modules) -> tuple[int, int]:
    """Return bytes freed before attention's backward: those of the dense feed-forward and the output
    projection, and those of norms and the copies that projections read."""
    c, hidden = modules.compute, arch.hidden_size
    normed = FP32 if find_family(arch).scales_before_cast else modules.stream
    norms = (arch.norms_per_layer - 1) * (hidden * FP32 + FP32 + hidden * normed * modules.trained)
    copies = modules.stream_copies(*list_stream_readers(arch)[1]) * hidden * c
    output = modules.inner_copies(list_parameter_names(arch).output) * get_attention_widths(arch).output * c
    return count_mlp_copies(arch, modules) * arch.intermediate_size * c + output, norms + copies
