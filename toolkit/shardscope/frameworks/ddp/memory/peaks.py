"""Peak candidates of a DDP step: activations, new gradients and the reducer's buckets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardscope.core.number_format import gib
from shardscope.core.ops import maximum, pick_largest_row, where
from shardscope.core.precision import widths
from shardscope.memory.activations.head import resolve_loss
from shardscope.memory.activations.stage_activations import StageBackward
from shardscope.memory.report import Phase, Term, sum_parts, zero_term
from shardscope.memory.state.training_state import PeakCandidate, PeakTerms

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.activations.modules.layer_peaks import LayerPeak
    from shardscope.memory.activations.stage_activations import LayerKind, LayerOrder, StageLayer
    from shardscope.memory.state.stages import Stage


NOTHING_GATHERED = zero_term("nothing is sharded, so nothing is gathered")
_SAVED = ("saved by the layers", "saved by the final norm and for the head", "autocast's copies of weights")
_IN_HEAD = (*_SAVED, "where the head's weight gets its gradient")
_IN_NORM = (*_SAVED, "gradients inside the final norm")
_IN_EMBEDDING = (
    "the gradient of the embedding's output",
    "the gradient of the embedding, or a tied weight's",
)
_IN_FORWARD = (
    "saved by the layers before",
    "saved, and in use inside one layer",
    "autocast's copies of weights",
)
_IN_LAYER = (
    "saved by the layers before this one",
    "in this layer: gradients, and what is left of what it saved",
    "autocast's copies of weights",
    "a tied head's gradient",
)


def find_peaks(plan: Plan, stage: Stage, shape: StageBackward, trained: Any) -> list[PeakCandidate]:
    """Return the peak candidates of a step.

    They cover the layers in forward, the loss, the head, the final norm, the layers in backward and the
    embedding.
    """
    return _Step(plan, stage, shape, trained).peaks()


class _Step:
    """Peak candidates of one rank's last micro-batches: without reduction (``no_sync``), then with it."""

    def __init__(self, plan: Plan, stage: Stage, shape: StageBackward, trained: Any) -> None:
        self.plan, self.stage, self.shape, self.trained = plan, stage, shape, trained
        self.width = widths[plan.recipe.precision]
        self.trains = not plan.recipe.has_adapters
        # Autocast's backward computes a weight's gradient in half precision and casts it for the bucket.
        self.mixed = plan.recipe.precision.endswith("mixed")
        self.each = self.width.compute + (self.width.original if self.mixed else 0)
        num_micro_batches = plan.num_micro_batches
        self.accumulates, self.only_two = num_micro_batches > 1, num_micro_batches == 2
        self.is_tied = plan.architecture.tie_word_embeddings and self.trains
        self.tied = self.width.original * stage.head if self.is_tied else 0
        """Bytes of a tied head's gradient, which autograd keeps until it is summed with the embedding's."""

    def peaks(self) -> list[PeakCandidate]:
        shape, order = self.shape, self.shape.find_layer_order()
        full = (shape.saved_by_layers, shape.saved_by_head, shape.weight_casts)
        once = self._gradient_bytes(0)
        found = []
        instants: dict[int, list[tuple[Any, Any]]] = {}
        for place in order.find_last_layers(shape.saved_by_layers):
            found.append(self._forward(order, place))
        for place in order.find_peak_layers(shape.saved_by_layers, lambda moe: 0):
            kind = id(place.kind)
            if kind not in instants:
                instants[kind] = self._instants(place.kind)
            found.append(self._layer(order, place, instants[kind]))
        embedding = (
            maximum(self.width.original * (self.stage.edges - self.stage.head), 3 * self.tied)
            if self.trains
            else 0
        )
        untied = 0 if self.is_tied else self.stage.head
        last = self._gradient_bytes(
            order.sum_before(order.num_layers, lambda kind: kind.weights) + self.trains * untied
        )
        return [
            *found,
            self._peak(0.34, full, _SAVED, once, shape.logits),
            self._peak(0.35, (*full, self._head()), _IN_HEAD, once),
            self._peak(0.355, (*full, self._norm()), _IN_NORM, self._gradient_bytes(self.trains * untied)),
            self._peak(0.97, (shape.stream_gradient, embedding), _IN_EMBEDDING, last),
        ]

    def _head(self) -> Any:
        """Return the bytes besides saved tensors while the head's weight gradient is computed, then cast."""
        plan, shape, width = self.plan, self.shape, self.width
        if not self.trains:
            return shape.stream_gradient
        copy = width.compute * self.stage.head
        logits = 0
        if resolve_loss(plan) == "full":
            tokens = plan.recipe.micro_batch_size * plan.recipe.seq_len
            logits = width.compute * plan.architecture.vocab_size * tokens
        return maximum(
            logits + copy,
            -(copy if self.mixed else 0) + self.each * self.stage.head + shape.stream_gradient,
        )

    def _norm(self) -> Any:
        """Return the bytes besides saved tensors in the final norm's backward.

        A tied head's gradient is allocated by then, and autocast's copy of the head is freed.
        """
        copy = self.width.compute * self.stage.head * (self.mixed and self.trains)
        return self.shape.in_final_norm + self.tied - copy

    def _forward(self, order: LayerOrder, place: StageLayer) -> PeakCandidate:
        """Return the candidate inside one layer's forward, with autocast's copies of all weights so far."""
        casts = order.sum_before(place.position + 1, lambda kind: kind.casts_after_forward)
        return self._peak(
            0.02 + 0.3 * (place.position + 1) / order.num_layers,
            (place.saved_before, place.kind.forward, casts),
            _IN_FORWARD,
            self._gradient_bytes(0),
            phase="forward",
        )

    def _instants(self, kind: LayerKind) -> list[tuple[Any, Any]]:
        """Return (bytes of activations and new gradients, weights with gradients in buckets) in one layer.

        One pair for each phase of the layer's backward.
        """
        return [
            (self._at(one), one.weights_with_gradient - one.current_matrix - one.current_experts)
            for one in kind.backward
        ]

    def _layer(self, order: LayerOrder, place: StageLayer, instants: list[tuple[Any, Any]]) -> PeakCandidate:
        """Return the candidate at the maximum of a layer's backward."""
        shape, layers = self.shape, order.num_layers
        above = order.sum_before(layers, lambda kind: kind.weights) - order.sum_before(
            place.position + 1, lambda kind: kind.weights
        )
        finished = above + (0 if self.is_tied else self.stage.head * self.trains)
        casts = (
            order.sum_before(place.position, lambda kind: kind.casts_in_backward)
            + place.kind.casts
            - shape.unsaved_casts
        )
        rows = []
        for now, done in instants:
            bucketed = self._gradient_bytes(finished + done)
            rows.append((now + bucketed, now, bucketed))
        _, held, gradients = pick_largest_row(rows)
        return self._peak(
            0.36 + 0.6 * (layers - 1 - place.position) / layers,
            (place.saved_before, held, casts, self.tied),
            _IN_LAYER,
            gradients,
        )

    def _at(self, one: LayerPeak) -> Any:
        """Return the bytes of activations and new weight gradients, minus autocast copies freed by then.

        Grouped matmuls are not autocast, so their weight gradients have the type of the weights.
        """
        copies = self.width.compute * one.autocast_weights if self.mixed else 0
        return (
            one.activations
            + self.each * one.current_matrix
            + self.width.original * one.current_experts
            - copies
        )

    def _gradient_bytes(self, finished: Any) -> Any:
        """Return the bytes of the buckets, and of the sums of unreduced micro-batches (``no_sync``).

        The first micro-batch allocates the sums; the last frees each one as it is copied into its bucket.
        """
        if self.accumulates is False:
            return self.trained
        finished = self.width.original * finished * self.trains
        beside = where(self.only_two, maximum(finished, self.trained - finished), self.trained)
        return self.trained + where(self.accumulates, beside, 0)

    def _peak(
        self,
        fraction: float,
        held: tuple[Any, ...],
        words: tuple[str, ...],
        gradients: Any,
        logits: Term | None = None,
        phase: Phase = "backward",
    ) -> PeakCandidate:
        """Return a peak candidate from its components in bytes, in the order of ``words``."""

        def terms() -> PeakTerms:
            source = None if words is _IN_EMBEDDING else self.shape.explain_layers
            return PeakTerms(
                sum_parts(*zip(held, words, strict=True), source=source),
                NOTHING_GATHERED,
                Term(gradients, lambda: self._explain_gradients(gradients)),
            )

        return PeakCandidate(fraction, sum(held), 0, gradients, terms, logits, phase)

    def _explain_gradients(self, held: int) -> str:
        width = self.width.original
        buckets = f"{self.trained // width:,} × {width} bytes, views of the reduction buckets"
        if not self.accumulates:
            return buckets
        return (
            f"{buckets} + {gib(held - self.trained)} GiB sums of earlier micro-batches beside them, for "
            "no_sync leaves gradients out of the buckets"
        )
