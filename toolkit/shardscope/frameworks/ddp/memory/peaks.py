"""Peak candidates of a DDP step: activations, new gradients and the reducer's buckets."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from shardscope.core.number_format import format_gib
from shardscope.core.ops import maximum, pick_largest_row, where
from shardscope.core.precision import widths
from shardscope.memory.activations.head import resolve_loss
from shardscope.memory.report import Phase, Term, sum_parts, zero_term
from shardscope.memory.state.training_state import PeakCandidate, PeakTerms

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.activations.layer_order import LayerKind, LayerOrder, StageLayer
    from shardscope.memory.activations.modules.layer_forward import LayerPeak
    from shardscope.memory.activations.stage_activations import StageBackward
    from shardscope.memory.state.stages import Stage


NOTHING_GATHERED = zero_term("nothing is sharded, so nothing is all-gathered")
_SAVED = ("saved by the layers", "saved by the final norm and for the head", "autocast's copies of weights")
_IN_HEAD = (*_SAVED, "the gradient of the head's weight, and what it is computed from")
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
    "in this layer: gradients, and saved tensors not freed yet",
    "autocast's copies of weights",
    "a tied head's gradient",
)


def find_peaks(plan: Plan, stage: Stage, backward: StageBackward, trained: int) -> list[PeakCandidate]:
    """Return the peak candidates of a step. ``trained``: bytes of all gradients.

    They cover the layers in forward, the loss, the head, the final norm, the layers in backward and the
    embedding.
    """
    return _StepPeaks(plan, stage, backward, trained).list_candidates()


class _StepPeaks:
    """Peak candidates of one rank's last micro-batches: without reduction (``no_sync``), then with it."""

    def __init__(self, plan: Plan, stage: Stage, backward: StageBackward, trained: int) -> None:
        self.plan, self.stage, self.backward, self.trained = plan, stage, backward, trained
        self.width = widths[plan.recipe.precision]
        self.trains_base = not plan.recipe.has_adapters
        # Autocast's backward computes a weight's gradient in half precision and casts it for the bucket.
        self.autocasts = plan.recipe.precision.endswith("mixed")
        self.gradient_width = self.width.compute + (self.width.original if self.autocasts else 0)
        num_micro_batches = plan.num_micro_batches
        self.accumulates, self.has_two_micro_batches = num_micro_batches > 1, num_micro_batches == 2
        self.is_tied = plan.architecture.tie_word_embeddings and self.trains_base
        self.tied_gradient = self.width.original * stage.head if self.is_tied else 0
        """Bytes of a tied head's gradient, which autograd keeps until it is summed with the embedding's."""
        self.head_in_bucket = 0 if self.is_tied else stage.head * self.trains_base
        """Weights of the head whose gradients are in a bucket once the head's backward is done."""

    def list_candidates(self) -> list[PeakCandidate]:
        backward, order = self.backward, self.backward.layer_order
        candidates = [
            self._build_in_forward(order, layer) for layer in order.find_last_layers(backward.saved_by_layers)
        ]
        peaks: dict[int, list[tuple[int, int]]] = {}
        for layer in order.find_peak_layers(backward.saved_by_layers, lambda moe: 0):
            # Layers of one kind have the same peaks, wherever they are: compute them once.
            kind = id(layer.kind)
            if kind not in peaks:
                peaks[kind] = self._list_layer_peaks(layer.kind)
            candidates.append(self._build_in_backward(order, layer, peaks[kind]))
        return [*candidates, *self._list_head(), self._build_embedding(order)]

    # ---- Gradients ----

    def _compute_gradients(self, finished: int) -> int:
        """Return the bytes of the buckets, and of the sums of unreduced micro-batches (``no_sync``).

        ``finished`` is the number of weights whose gradients the last backward has computed. The first
        micro-batch allocates the sums; the last frees each one as it is copied into its bucket.
        """
        # One plan without accumulation; in an array of plans, the flag is an array.
        if self.accumulates is False:
            return self.trained
        finished_bytes = self.width.original * finished * self.trains_base
        # With two micro-batches, the first still allocates its sums and the last already frees them. With
        # more, one between them has all.
        sums = where(
            self.has_two_micro_batches, maximum(finished_bytes, self.trained - finished_bytes), self.trained
        )
        return self.trained + where(self.accumulates, sums, 0)

    def _explain_gradients(self, gradients: int) -> str:
        width = self.width.original
        buckets = f"{self.trained // width:,} × {width} bytes, views of the reduction buckets"
        if not self.accumulates:
            return buckets
        return f"{buckets} + {explain_accumulated(gradients - self.trained)}"

    # ---- Head, final norm and embedding ----

    def _list_head(self) -> list[PeakCandidate]:
        """Return the candidates at the loss, the head and the final norm."""
        backward = self.backward
        saved = (backward.saved_by_layers, backward.saved_by_head, backward.weight_casts)
        none_finished = self._compute_gradients(0)
        head_finished = self._compute_gradients(self.head_in_bucket)
        return [
            self._build_candidate(0.34, saved, _SAVED, none_finished, backward.logits),
            self._build_candidate(0.35, (*saved, self._compute_in_head()), _IN_HEAD, none_finished),
            self._build_candidate(0.355, (*saved, self._compute_in_norm()), _IN_NORM, head_finished),
        ]

    def _compute_in_head(self) -> int:
        """Return the bytes besides saved tensors while the head's weight gradient is computed, then cast."""
        plan, width, stream_gradient = self.plan, self.width, self.backward.stream_gradient
        if not self.trains_base:
            return stream_gradient
        half_gradient = width.compute * self.stage.head
        logits = 0
        if resolve_loss(plan) == "full":
            tokens = plan.recipe.micro_batch_size * plan.recipe.seq_len
            logits = width.compute * plan.architecture.vocab_size * tokens
        # Autocast's copy of the head, as large as the half-precision gradient, is freed before the cast.
        freed_copy = half_gradient if self.autocasts else 0
        # First the matmul, with the logits' gradient, which is freed before the cast to the bucket's type.
        return maximum(
            logits + half_gradient,
            self.gradient_width * self.stage.head + stream_gradient - freed_copy,
        )

    def _compute_in_norm(self) -> int:
        """Return the bytes besides saved tensors in the final norm's backward.

        A tied head's gradient is allocated by then, and autocast's copy of the head is freed.
        """
        freed_copy = self.width.compute * self.stage.head * (self.autocasts and self.trains_base)
        return self.backward.in_final_norm + self.tied_gradient - freed_copy

    def _build_embedding(self, order: LayerOrder) -> PeakCandidate:
        """Return the candidate at the embedding's gradient, the last one of the step."""
        embedding = 0
        if self.trains_base:
            untied = self.width.original * (self.stage.edges - self.stage.head)
            # Tied: the gradient of the head, of the embedding, and their sum.
            embedding = maximum(untied, 3 * self.tied_gradient)
        in_layers = order.sum_before(order.num_layers, lambda kind: kind.weights)
        gradients = self._compute_gradients(in_layers + self.head_in_bucket)
        return self._build_candidate(
            0.97, (self.backward.stream_gradient, embedding), _IN_EMBEDDING, gradients
        )

    # ---- Layers ----

    def _build_in_forward(self, order: LayerOrder, layer: StageLayer) -> PeakCandidate:
        """Return the candidate inside one layer's forward, with autocast's copies of all weights so far."""
        casts = order.sum_before(layer.position + 1, lambda kind: kind.casts_after_forward)
        return self._build_candidate(
            0.02 + 0.3 * (layer.position + 1) / order.num_layers,
            (layer.saved_before, layer.kind.forward, casts),
            _IN_FORWARD,
            self._compute_gradients(0),
            phase="forward",
        )

    def _list_layer_peaks(self, kind: LayerKind) -> list[tuple[int, int]]:
        """Return the peak candidates of one layer's backward.

        Each is (bytes of activations and new gradients, number of weights whose gradients are in buckets).
        """
        return [
            (
                self._compute_layer_peak(peak),
                peak.weights_with_gradient - peak.current_matrix - peak.current_experts,
            )
            for peak in kind.backward
        ]

    def _compute_layer_peak(self, peak: LayerPeak) -> int:
        """Return the bytes of activations and new weight gradients, minus autocast copies freed by then.

        Grouped matmuls are not autocast, so their weight gradients have the type of the weights.
        """
        freed_copies = self.width.compute * peak.autocast_weights if self.autocasts else 0
        gradients = self.gradient_width * peak.current_matrix + self.width.original * peak.current_experts
        return peak.activations + gradients - freed_copies

    def _build_in_backward(
        self, order: LayerOrder, layer: StageLayer, peaks: list[tuple[int, int]]
    ) -> PeakCandidate:
        """Return the candidate at the maximum of a layer's backward."""
        num_layers, position = order.num_layers, layer.position
        # Backward has passed the layers after this one, and casts exist of this one and those before it.
        later_layers = order.sum_before(num_layers, lambda kind: kind.weights) - order.sum_before(
            position + 1, lambda kind: kind.weights
        )
        finished = later_layers + self.head_in_bucket
        casts_before = order.sum_before(position, lambda kind: kind.casts_in_backward)
        casts = casts_before + layer.kind.casts - self.backward.unsaved_casts
        rows = []
        for in_layer, weights in peaks:
            gradients = self._compute_gradients(finished + weights)
            rows.append((in_layer + gradients, in_layer, gradients))
        _, in_layer, gradients = pick_largest_row(rows)
        return self._build_candidate(
            0.36 + 0.6 * (num_layers - 1 - position) / num_layers,
            (layer.saved_before, in_layer, casts, self.tied_gradient),
            _IN_LAYER,
            gradients,
        )

    # ---- One candidate ----

    def _build_candidate(
        self,
        fraction: float,
        activations: tuple[int, ...],
        texts: tuple[str, ...],
        gradients: int,
        logits: Term | None = None,
        phase: Phase = "backward",
    ) -> PeakCandidate:
        """Return a peak candidate from its components in bytes, in the order of ``texts``."""
        explain = partial(self._explain_candidate, activations, texts, gradients)
        return PeakCandidate(fraction, sum(activations), 0, gradients, explain, logits, phase)

    def _explain_candidate(
        self, activations: tuple[int, ...], texts: tuple[str, ...], gradients: int
    ) -> PeakTerms:
        """Return the candidate's bytes as terms, with their explanations."""
        source = None if texts is _IN_EMBEDDING else self.backward.explain_layers
        return PeakTerms(
            sum_parts(*zip(activations, texts, strict=True), source=source),
            NOTHING_GATHERED,
            Term(gradients, lambda: self._explain_gradients(gradients)),
        )


def explain_accumulated(num_bytes: int) -> str:
    """Return the explanation of gradients that ``no_sync`` sums outside of the buckets."""
    return (
        f"{format_gib(num_bytes)} GiB sums of earlier micro-batches in separate tensors: no_sync leaves "
        "gradients out of the buckets"
    )
