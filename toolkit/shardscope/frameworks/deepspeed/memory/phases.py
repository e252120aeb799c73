"""Elements and buffers in the phases of ZeRO's backward, which the optimizers count and ``peaks.py`` uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.ops import maximum

if TYPE_CHECKING:
    from shardscope.frameworks.deepspeed.memory.element_counts import LayerPhases
    from shardscope.memory.activations.layer_order import LayerKind


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
