"""Elements and buffers in the phases of ZeRO's backward, which the optimizers count and ``peaks.py`` uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.ops import maximum

if TYPE_CHECKING:
    from shardscope.memory.activations.layer_order import LayerKind

_NUM_MATRICES = 3
"""Matrices of a gated feed-forward; with fewer matrices the last entry is repeated."""
_LARGEST = 3
"""Place of the largest layer in :func:`choose_layers`."""


class PhaseElements(NamedTuple):
    """Elements in one phase of backward, without permanent buffers."""

    staging: int
    """All-gathered parameters, unreduced gradients and copies of them."""
    gradients: int
    """Gradients that stay until the optimizer step."""

    @property
    def total(self) -> int:
        return self.staging + self.gradients


class BackwardPart(NamedTuple):
    """Part of backward: the head and final norm, one decoder layer, the embedding, or the final reduction."""

    first_gradient: PhaseElements
    """At its first gradient; in the head's part, at the norm's gradient."""
    peak: PhaseElements
    """At its maximum."""
    before_attention: PhaseElements | None = None
    """Between the feed-forward's gradients and attention's, if they are distinguished."""
    feed_forward: tuple[PhaseElements, ...] = ()
    """At the gradient of each of the feed-forward's large matrices, if they are distinguished."""
    attention_output: PhaseElements = PhaseElements(0, 0)
    """At the maximum after the feed-forward, attention's first gradient included."""
    at_logits: PhaseElements | None = None
    """In the head's part, at the maximum while the logits' gradient exists; None: ``peak``. The hook that
    reduces the head's gradient runs after it is freed."""
    at_experts: PhaseElements | None = None
    """At the weighting of experts' rows, with their matrices all-gathered; None: ``first_gradient``."""
    after_down: PhaseElements | None = None
    """At the activation's backward, after the gradient of the feed-forward's last matrix, which stays
    autograd's tensor if it is larger than the bucket; None: ``first_gradient``."""


class LayerPhases(NamedTuple):
    """Phases of one decoder layer's backward."""

    first_gradient: PhaseElements
    at_experts: PhaseElements
    """At the weighting of experts' rows, with their matrices all-gathered."""
    after_down: PhaseElements
    """At the activation's backward, after the gradient of the feed-forward's last matrix."""
    before_attention: PhaseElements
    """Between the feed-forward's gradients and attention's."""
    peak: PhaseElements
    feed_forward: tuple[PhaseElements, ...]
    """At the gradient of each feed-forward matrix; ``first_gradient`` if these are not simulated."""
    last_feed_forward: PhaseElements
    """At the gradient of the last of these matrices."""
    next_layer: PhaseElements
    """At the first gradient of the next layer in backward, or of the embedding."""
    attention_output: PhaseElements
    """At the maximum after the feed-forward, attention's first gradient included."""


class BackwardPhases(NamedTuple):
    """Phases of a backward: array formulas need a fixed number, those of the parts that can have the peak."""

    head: LayerPhases
    """Backward of the head and the final norm."""
    head_at_logits: PhaseElements
    """The same part, while the logits' gradient exists."""
    layers: tuple[LayerPhases, ...]
    """Backward of the layers of :func:`choose_layers`."""
    layers_before_largest: int
    """Number of layers that backward passes before the (first) largest one."""
    embedding: PhaseElements
    """Maximum of the embedding's backward."""


class ZeroBuffers(NamedTuple):
    """Buffers and gradients on one rank besides activations, in bytes."""

    bucket: int = 0
    """ipg bucket, allocated at the first gradient."""
    head_is_first: bool = True
    """Whether the first gradient is the head's; else the bucket is allocated after the last layer's
    feed-forward, or, if all weights are trained, from the last layer on."""
    trains_all: bool = True
    after_forward: int = 0
    """All-gathered parameters and bucket at the end of forward; if not 0, the bucket is always allocated."""
    earlier_gradients: int = 0
    """Gradients of earlier micro-batches, in addition to those counted part by part."""
    gradients_at_loss: int = 0
    """All gradients during the loss's backward."""
    gathers_in_forward: bool = False
    """Whether parameters are all-gathered in forward too."""
    in_pipeline: int = 0
    """Buffers and tensors of a pipeline stage during backward (``pipeline.py``)."""


def list_layer_elements(phases: LayerPhases, kind: LayerKind, down_projection: int) -> list[PhaseElements]:
    """Return ZeRO's elements at each of the kind's peak candidates, from the end of the layer to its start.

    ``down_projection``: elements freed after the down projection's gradient. After the feed-forward these are
    the norm after attention, attention's output projection, its core, its query norm, its input projections,
    and the layer's first norm.
    """
    attention = [phases.attention_output, phases.attention_output, phases.before_attention]
    attention += [phases.attention_output, phases.peak, phases.next_layer]
    matrices = phases.feed_forward
    if not kind.moe:
        first, second = matrices[0], matrices[min(1, len(matrices) - 1)]
        # A plain feed-forward and a gated one have equally many candidates.
        copied = PhaseElements(maximum(0, first.staging - down_projection), first.gradients)
        feed_forward = [phases.first_gradient, first, copied, second]
        # A norm after the feed-forward comes first.
        norms = [phases.first_gradient] * (len(kind.backward) - len(feed_forward) - len(attention))
        return [*norms, *feed_forward, *attention]
    # Shared experts, if any, the weighting of rows, the down projection, the product, the up projection.
    experts = [phases.first_gradient, matrices[0], phases.first_gradient, phases.last_feed_forward]
    num_shared = len(kind.backward) - len(experts) - len(attention)
    return [phases.first_gradient] * num_shared + experts + attention


def choose_layers(layers: Sequence[BackwardPart], full_attention: int | None) -> list[int]:
    """Return the indices of the decoder layers that can have the peak, in the order of backward.

    They are the first, the second, the last and the largest; and ``full_attention``, the first layer in
    forward order without a sliding window, if only some layers have one.
    """
    totals = [layer.peak.total for layer in layers]
    last = len(layers) - 1
    chosen = [0, min(1, last), last, totals.index(max(totals))]
    return chosen if full_attention is None else [*chosen, full_attention]


def choose_phases(parts: Sequence[BackwardPart], full_attention: int | None) -> BackwardPhases:
    """Return the phases of the parts of a backward without its final reduction."""
    head, *layers, embedding = parts
    chosen = choose_layers(layers, full_attention)
    return BackwardPhases(
        head=_get_layer_phases(head, parts[1].first_gradient),
        head_at_logits=head.at_logits or head.peak,
        layers=tuple(_get_layer_phases(layers[index], parts[index + 2].first_gradient) for index in chosen),
        layers_before_largest=chosen[_LARGEST],
        embedding=embedding.peak,
    )


def _get_layer_phases(part: BackwardPart, next_layer: PhaseElements) -> LayerPhases:
    matrices = part.feed_forward[:_NUM_MATRICES] or (part.first_gradient,)
    return LayerPhases(
        first_gradient=part.first_gradient,
        at_experts=part.at_experts or part.first_gradient,
        after_down=part.after_down or part.first_gradient,
        before_attention=part.before_attention or part.first_gradient,
        peak=part.peak,
        feed_forward=(*matrices, *matrices[-1:] * (_NUM_MATRICES - len(matrices))),
        last_feed_forward=part.feed_forward[-1] if part.feed_forward else part.peak,
        next_layer=next_layer,
        attention_output=part.attention_output,
    )
