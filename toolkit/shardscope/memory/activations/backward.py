"""What one rank holds while backward is in a layer of the transformers library's, layer by layer.

Read off the operators themselves, as rehearsals record them: autograd frees what a layer saved as it goes, so
the fullest instant in a layer is where its feed-forward's product is taken apart, and the fullest of the step
is in the first layers that backward meets, or in its last one, when whole gradients wait beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from shardscope.core.arrays.arithmetic import is_array, smallest
from shardscope.core.precision import FP32
from shardscope.families.parameter_names import names_of
from shardscope.families.registry import family_of
from shardscope.memory.activations.modules.attention import (
    has_one_key_head,
    is_eager,
    scores_per_token,
    widths,
)
from shardscope.memory.activations.modules.decoder import mlp_copies
from shardscope.memory.activations.modules.experts import expert_tensors
from shardscope.memory.activations.modules.saved import stream_readers
from shardscope.memory.report import Phase, Term

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.memory.activations.modules.saved import Modules
    from shardscope.memory.layer_order import Order


class LayerBackward(NamedTuple):
    """Bytes for one token of one layer, beside all that was saved."""

    inside: int
    """Where the feed-forward's product is taken apart: the gradient in the stream, of the product's two
    factors and of itself, less the product."""
    stream: int
    """The gradient that passes from layer to layer."""
    later: int
    """Where routed experts' first matrices get their gradients, all of them whole by then; less what the
    experts had saved. As ``inside`` in a dense layer."""
    earlier: int
    """Where experts' rows are weighted, before any of their weights has a gradient; else as ``inside``."""
    core: int
    """In attention's scores behind routed experts, less what the experts had saved; 0 where scores are no
    tensors, or stand behind a dense feed-forward, whose ``inside`` has them."""


class Backward(NamedTuple):
    """Bytes on one rank, one micro-batch."""

    layers: int
    """What all layers have saved, and the token ids."""
    edges: int
    """What the final norm and the head have saved."""
    cast: int
    """Half-precision copies of weights, that autocast's autograd still holds."""
    cast_unsaved: int
    """Copies of the first layer's adapters that it does not keep: no gradient goes past it."""
    stream: int
    """The gradient that passes from layer to layer."""
    norm: int
    """Beside all that was saved, in the final norm."""
    logits: Term
    """Logits and their gradients while the loss is differentiated."""
    explain_layers: Callable[[], str]
    """What a layer leaves for backward, and the source of that."""
    find_order: Callable[[], Order]
    """The layers one by one, for frameworks that tell them apart."""
    find_fullest: Callable[[], FullestLayer]
    """The fullest layer, for those that take it for all."""


class FullestLayer(NamedTuple):
    """The layer that holds most while it goes backward. Bytes on one rank, one micro-batch."""

    saved: int
    """What it has saved."""
    inside: int
    """Beside that, recomputed activations included."""
    later: int
    """The same where routed experts' gradients are all there; as ``inside`` in a dense layer."""
    earlier: int
    """The same where their rows are weighted, before any gradient; as ``inside`` in a dense layer."""
    core: int
    """The same in attention's scores, once routed experts are through; 0 in a dense layer, or if fused."""
    recomputed: int
    """Of these, what its forward makes again; 0 if it is none of those that are recomputed."""
    again: int
    """What those make that are."""


class PeakTerms(NamedTuple):
    """Where the bytes of an instant come from."""

    activations: Term
    gather: Term
    gradients: Term


@dataclass(slots=True)
class Peak:
    """One instant of forward or backward, as the framework's own state sees it. Bytes on one rank.

    Of most instants nobody asks more than their sum: bytes are plain numbers here, and terms only when asked.
    Two dozen are made for each prediction, so this is the kind of object that Python makes fastest.
    """

    fraction: float
    activations: Any
    gather: Any
    gradients: Any
    find_terms: Callable[[], PeakTerms]
    """The same bytes, part by part and in words."""
    logits: Term | None = None
    """Logits, while the loss is computed or differentiated."""
    phase: Phase = "backward"
    """``forward`` where a collective of forward holds more than its end does."""

    @classmethod
    def of(
        cls,
        fraction: float,
        activations: Term,
        gather: Term,
        gradients: Term,
        logits: Term | None = None,
        phase: Phase = "backward",
    ) -> Peak:
        """An instant whose parts are terms already."""
        terms = PeakTerms(activations, gather, gradients)
        return cls(fraction, activations[0], gather[0], gradients[0], lambda: terms, logits, phase)


def places(deepest: Any) -> list[Any]:
    """Layers that backward has passed where it may be fullest: none, one, and all that matter."""
    found = [0, smallest(1, deepest), deepest]
    return found if is_array(deepest) else sorted(set(found))


@lru_cache(maxsize=4096)
def layer_backward(arch: Architecture, moe: bool, modules: Modules) -> LayerBackward:
    """What a layer's backward needs, by its kind of feed-forward and of attention."""
    c, hidden = modules.compute, arch.hidden_size
    stream = hidden * modules.stream
    experts = arch.mixture_of_experts
    if moe and experts is not None:
        rows = experts.num_experts_per_tok
        # Grouped products are not autocast: they run in the weights' own type.
        width = modules.stream
        # Gradients of the weighted rows, of their sum and of the weights, in the router's fp32; a cast.
        weighted = rows * hidden * (3 * FP32 + (width if width < FP32 else 0))
        inner = rows * experts.moe_intermediate_size * width * (2 if modules.trained else 3)
        saved = sum(t.bytes_per_token for t in expert_tensors(arch, modules) if t.operator == "experts")
        both = rows * width * (2 * experts.moe_intermediate_size + hidden)
        inside = stream + inner - rows * hidden * width
        # Once the experts and their norm are done with, attention in plain operations may need more.
        scores = _score_gradients(arch, modules)
        core = stream + scores - hidden * (2 * FP32 + 2 * c) - saved if scores else 0
        return LayerBackward(inside, stream, stream + both - saved, stream + weighted, core)
    inner = arch.intermediate_size * (c * inner_gradients(arch, modules) - dropped_mask(arch, modules))
    inside = stream + max(inner, _scores(arch, modules))
    return LayerBackward(inside, stream, inside, inside, 0)


def dropped_mask(arch: Architecture, modules: Modules) -> int:
    """Bytes of a number in the mask of what the feed-forward's last adapter dropped, gone by then."""
    return int(modules.adapter_dropout and modules.on_gpu and names_of(arch).down in (modules.targets or ()))


def inner_gradients(arch: Architecture, modules: Modules) -> int:
    """Gradients as wide as the feed-forward at once, less the product that was saved and is gone."""
    if not arch.gated_mlp:
        product = modules.inner_copies(names_of(arch).down)
        activation = family_of(arch).activation
        if activation == "gelu_new":
            # CUDA's autocast takes its cube in fp32, and so the gradients of both factors.
            return (6 if modules.autocast and modules.on_gpu else 3) - product
        # One kernel's gradients of its output and input; a square has a factor more.
        return (4 if activation == "relu2" else 2) - product
    if modules.kernels == "liger":
        # Both branches' gradients take the branches' own place (liger-kernel, ops/swiglu.py).
        return 1
    if modules.kernels == "compiled":
        # One kernel takes the product apart, and one branch's gradient takes that branch's own place: what is
        # donated to a compiled backward is written over (torch/_inductor/ir.py, DonatedBuffer).
        return 1 if modules.inner_copies("down_proj") else 2
    return 2 if modules.inner_copies("down_proj") else 3


def _scores(arch: Architecture, modules: Modules) -> int:
    """Attention in plain operations: gradients of the probabilities, the softmax and the cap."""
    if not scores_per_token(arch, modules):
        return 0
    scores = _score_gradients(arch, modules)
    c, inner, hidden = modules.compute, arch.intermediate_size, arch.hidden_size
    if is_eager(arch, modules):
        return max(0, scores - _behind_attention(arch, modules))
    if has_one_key_head(arch):
        # Falcon's feed-forward stands beside attention, and reads the same norm's output.
        return max(0, scores - (1 + modules.inner_copies("dense_4h_to_h")) * inner * c)
    # By then the feed-forward and its norm have let go of what they saved.
    return max(0, scores - 4 * inner * c - hidden * (2 * FP32 + 2 * c))


def _score_gradients(arch: Architecture, modules: Modules) -> int:
    """Gradients as large as attention's scores at once; 0 for a fused kernel."""
    if not scores_per_token(arch, modules):
        return 0
    each = arch.num_attention_heads * modules.seq_len
    if family_of(arch).has_attention_sinks:
        # The softmax's, and with the sink's place again, where the maximum's is added.
        return 2 * each * modules.stream
    return each * (modules.compute + FP32 if is_eager(arch, modules) else 2 * FP32)


def _behind_attention(arch: Architecture, modules: Modules) -> int:
    """What a dense layer's feed-forward, its norms and the output projection have let go of by then."""
    c, hidden = modules.compute, arch.hidden_size
    normed = FP32 if family_of(arch).scales_before_cast else modules.stream
    norms = (arch.norms_per_layer - 1) * (hidden * FP32 + FP32 + hidden * normed * modules.trained)
    copies = modules.stream_copies(*stream_readers(arch)[1]) * hidden * c
    output = modules.inner_copies(names_of(arch).output) * widths(arch).output * c
    return mlp_copies(arch, modules) * arch.intermediate_size * c + norms + copies + output


def final_norm(arch: Architecture, modules: Modules) -> int:
    """Bytes of a token while the final norm is differentiated, beside what it saved."""
    if arch.norm == "layernorm" or modules.kernels == "liger":
        return arch.hidden_size * modules.normed
    # x^2's gradient in plain operations: four fp32 numbers of the stream's width.
    return arch.hidden_size * (4 * FP32)


def norm_before_head(arch: Architecture, modules: Modules, head_input: int) -> int:
    """The same of the final norm, once the head has gone backward: ``head_input`` bytes of a token are gone.

    Trained, an RMSNorm has let go of what it put out before its weight when x^2 is differentiated.
    """
    if not modules.trained or modules.kernels != "transformers":
        return final_norm(arch, modules)
    if arch.norm == "layernorm":
        return arch.hidden_size * 2 * modules.stream - head_input
    normed = FP32 if family_of(arch).scales_before_cast else modules.stream
    return arch.hidden_size * (5 * FP32 - normed) - head_input
