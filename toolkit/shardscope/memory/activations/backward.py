"""Peak memory of backward through the layers of transformers' modules.

Derived from the operators, as rehearsals record them. Autograd frees the saved tensors of a layer one by one,
so the peak inside a layer is the backward of the feed-forward's product (gate times up). The peak of the step
is in the first layers of backward, or in the last one if unsharded gradients accumulate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from shardscope.core.ops import is_array, minimum
from shardscope.core.precision import FP32
from shardscope.families.parameter_names import names_of
from shardscope.families.registry import family_of
from shardscope.memory.activations.modules.attention import (
    compute_saved_scores,
    get_attention_widths,
    has_one_key_head,
    is_eager,
)
from shardscope.memory.activations.modules.decoder import count_mlp_copies
from shardscope.memory.activations.modules.experts import list_expert_tensors
from shardscope.memory.activations.modules.saved import list_stream_readers
from shardscope.memory.report import Phase, Term

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.memory.activations.modules.saved import Modules
    from shardscope.memory.layer_order import LayerOrder


class LayerBackward(NamedTuple):
    """Bytes per token in one layer's backward, on top of all saved activations."""

    inside: int
    """At the backward of the feed-forward's product: the gradients of the residual stream, of the product and
    of its two factors, less the saved product."""
    stream: int
    """Gradient of the residual stream."""
    later: int
    """At the gradient of the routed experts' first matrices, when all expert gradients exist, less the
    experts' saved tensors. Equals ``inside`` in a dense layer."""
    earlier: int
    """At the weighting of the experts' rows, before any expert weight has a gradient. Equals ``inside`` in a
    dense layer."""
    core: int
    """At attention's scores, after the routed experts' backward, less the experts' saved tensors; 0 if scores
    are not materialized, and in a dense layer, whose ``inside`` includes them."""


class StageBackward(NamedTuple):
    """Bytes on one rank during backward, one micro-batch."""

    layers: int
    """Activations saved by all layers, and the token ids."""
    edges: int
    """Activations saved by the final norm and the head."""
    cast: int
    """Autocast's half-precision copies of weights, kept by autograd."""
    cast_unsaved: int
    """Copies of the first layer's adapters that autograd does not keep, because no gradient reaches their
    input."""
    stream: int
    """Gradient of the residual stream."""
    norm: int
    """At the final norm's backward, on top of all saved activations."""
    logits: Term
    """Logits and their gradients at the backward of the loss."""
    explain_layers: Callable[[], str]
    """Returns the formula and source of the layers' saved activations."""
    find_order: Callable[[], LayerOrder]
    """Returns the layers one by one, for frameworks that treat layers differently."""
    find_fullest: Callable[[], LargestLayer]
    """Returns the largest layer, for frameworks that use it for all layers."""


class LargestLayer(NamedTuple):
    """The layer with the largest backward peak. Bytes on one rank, one micro-batch."""

    saved: int
    """Its saved activations."""
    inside: int
    """At its peak, on top of ``saved``, recomputed activations included."""
    later: int
    """The same when all routed experts' gradients exist; equals ``inside`` in a dense layer."""
    earlier: int
    """The same at the weighting of experts' rows, before any gradient; equals ``inside`` in a dense layer."""
    core: int
    """The same at attention's scores, after the routed experts' backward; 0 in a dense layer, or if fused."""
    recomputed: int
    """Recomputed activations among these; 0 if this layer is not recomputed."""
    again: int
    """Recomputed activations of the layer kind with the most."""


class PeakTerms(NamedTuple):
    """Terms of one peak candidate: bytes with their explanations."""

    activations: Term
    gather: Term
    gradients: Term


@dataclass(slots=True)
class PeakCandidate:
    """One peak candidate in forward or backward, with the framework's own state. Bytes on one rank.

    Bytes are plain numbers and terms are built lazily, because most candidates only need their sum. About two
    dozen are created per prediction, so this is a slotted dataclass, the fastest kind of object to create.
    """

    fraction: float
    activations: Any
    gather: Any
    gradients: Any
    find_terms: Callable[[], PeakTerms]
    """Returns the same bytes as terms, with explanations."""
    logits: Term | None = None
    """Logits at the forward or backward of the loss."""
    phase: Phase = "backward"
    """``forward`` if a collective in forward needs more memory than the end of forward."""

    @classmethod
    def of(
        cls,
        fraction: float,
        activations: Term,
        gather: Term,
        gradients: Term,
        logits: Term | None = None,
        phase: Phase = "backward",
    ) -> PeakCandidate:
        """Build a peak candidate from terms."""
        terms = PeakTerms(activations, gather, gradients)
        return cls(fraction, activations[0], gather[0], gradients[0], lambda: terms, logits, phase)


def list_candidate_depths(deepest: Any) -> list[Any]:
    """Return the numbers of layers that backward has passed at its peak candidates: 0, 1 and ``deepest``."""
    found = [0, minimum(1, deepest), deepest]
    return found if is_array(deepest) else sorted(set(found))


@lru_cache(maxsize=4096)
def compute_layer_backward(arch: Architecture, moe: bool, modules: Modules) -> LayerBackward:
    """Return the bytes of one layer's backward, dense or MoE, for its attention implementation."""
    c, hidden = modules.compute, arch.hidden_size
    stream = hidden * modules.stream
    experts = arch.mixture_of_experts
    if moe and experts is not None:
        rows = experts.num_experts_per_tok
        # Grouped matmuls are not autocast: they run in the weights' dtype.
        width = modules.stream
        # Gradients of the weighted rows, of their sum and of the router weights, in the router's fp32; a
        # cast.
        weighted = rows * hidden * (3 * FP32 + (width if width < FP32 else 0))
        inner = rows * experts.moe_intermediate_size * width * (2 if modules.trained else 3)
        saved = sum(t.bytes_per_token for t in list_expert_tensors(arch, modules) if t.operator == "experts")
        both = rows * width * (2 * experts.moe_intermediate_size + hidden)
        inside = stream + inner - rows * hidden * width
        # After the backward of the experts and their norm, eager attention may need more.
        scores = _compute_score_gradients(arch, modules)
        core = stream + scores - hidden * (2 * FP32 + 2 * c) - saved if scores else 0
        return LayerBackward(inside, stream, stream + both - saved, stream + weighted, core)
    inner = arch.intermediate_size * (
        c * count_inner_gradients(arch, modules) - compute_dropped_mask(arch, modules)
    )
    inside = stream + max(inner, _compute_attention_excess(arch, modules))
    return LayerBackward(inside, stream, inside, inside, 0)


def compute_dropped_mask(arch: Architecture, modules: Modules) -> int:
    """Return bytes per element of the down projection's adapter dropout mask, which is freed by then."""
    return int(modules.adapter_dropout and modules.on_gpu and names_of(arch).down in (modules.targets or ()))


def count_inner_gradients(arch: Architecture, modules: Modules) -> int:
    """Return how many intermediate-size gradients are alive at once, less the freed saved product."""
    if not arch.gated_mlp:
        product = modules.inner_copies(names_of(arch).down)
        activation = family_of(arch).activation
        if activation == "gelu_new":
            # CUDA's autocast computes its cube in fp32, and so the gradients of both factors.
            return (6 if modules.autocast and modules.on_gpu else 3) - product
        # One kernel: the gradients of its output and input. The squared ReLU has two more.
        return (4 if activation == "relu2" else 2) - product
    if modules.kernels == "liger":
        # Both branches' gradients overwrite the branches (liger-kernel, ops/swiglu.py).
        return 1
    if modules.kernels == "compiled":
        # One kernel computes both branches' gradients, and one of them overwrites its branch: buffers donated
        # to a compiled backward are reused (torch/_inductor/ir.py, DonatedBuffer).
        return 1 if modules.inner_copies("down_proj") else 2
    return 2 if modules.inner_copies("down_proj") else 3


def _compute_attention_excess(arch: Architecture, modules: Modules) -> int:
    """Return the bytes of unfused attention's backward: gradients of probabilities, softmax and soft cap."""
    if not compute_saved_scores(arch, modules):
        return 0
    scores = _compute_score_gradients(arch, modules)
    c, inner, hidden = modules.compute, arch.intermediate_size, arch.hidden_size
    if is_eager(arch, modules):
        return max(0, scores - _compute_freed_after_attention(arch, modules))
    if has_one_key_head(arch):
        # Falcon's feed-forward is parallel to attention, and reads the same norm's output.
        return max(0, scores - (1 + modules.inner_copies("dense_4h_to_h")) * inner * c)
    # The feed-forward and its norm have freed their saved tensors by then.
    return max(0, scores - 4 * inner * c - hidden * (2 * FP32 + 2 * c))


def _compute_score_gradients(arch: Architecture, modules: Modules) -> int:
    """Return bytes per token of the gradients of attention scores alive at once; 0 for a fused kernel."""
    if not compute_saved_scores(arch, modules):
        return 0
    each = arch.num_attention_heads * modules.seq_len
    if family_of(arch).has_attention_sinks:
        # The softmax's gradient, and its copy with the sink's column, to which the maximum's gradient is
        # added.
        return 2 * each * modules.stream
    return each * (modules.compute + FP32 if is_eager(arch, modules) else 2 * FP32)


def _compute_freed_after_attention(arch: Architecture, modules: Modules) -> int:
    """Return bytes freed before attention's backward: dense feed-forward, its norms and output projection."""
    c, hidden = modules.compute, arch.hidden_size
    normed = FP32 if family_of(arch).scales_before_cast else modules.stream
    norms = (arch.norms_per_layer - 1) * (hidden * FP32 + FP32 + hidden * normed * modules.trained)
    copies = modules.stream_copies(*list_stream_readers(arch)[1]) * hidden * c
    output = modules.inner_copies(names_of(arch).output) * get_attention_widths(arch).output * c
    return count_mlp_copies(arch, modules) * arch.intermediate_size * c + norms + copies + output


def compute_final_norm(arch: Architecture, modules: Modules) -> int:
    """Return bytes per token at the final norm's backward, on top of its saved tensors."""
    if arch.norm == "layernorm" or modules.kernels == "liger":
        return arch.hidden_size * modules.normed
    # The gradient of x^2 in eager PyTorch: four fp32 tensors of the hidden size.
    return arch.hidden_size * (4 * FP32)


def compute_norm_after_head(arch: Architecture, modules: Modules, head_input: int) -> int:
    """Return bytes per token at the final norm's backward, after the head's.

    The head has freed ``head_input`` bytes per token by then. A trained RMSNorm has also freed its normalized
    output when the gradient of x^2 is computed.
    """
    if not modules.trained or modules.kernels != "transformers":
        return compute_final_norm(arch, modules)
    if arch.norm == "layernorm":
        return arch.hidden_size * 2 * modules.stream - head_input
    normed = FP32 if family_of(arch).scales_before_cast else modules.stream
    return arch.hidden_size * (5 * FP32 - normed) - head_input
