"""Peak candidates of ZeRO's backward: reductions and all-gathers on top of autograd's saved tensors.

The optimizers (``zero_optimizer_stage3.py``, ``zero_optimizer_stage_1_and_2.py``) count the elements that are
all-gathered, copied and reduced in each part of backward. Here the saved tensors that exist in each of these
phases are added, operator by operator, as transformers' modules run.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.number_format import format_gib
from shardscope.core.ops import any_true, is_array, maximum, minimum, pick_largest_row, where
from shardscope.frameworks.deepspeed.memory.phases import (
    LayerPhases,
    PhaseElements,
    ZeroBuffers,
    list_layer_elements,
)
from shardscope.frameworks.deepspeed.memory.pipeline import explain_buffers
from shardscope.memory.activations.largest_layer import LargestLayer, list_candidate_depths
from shardscope.memory.report import Phase, Term, sum_parts
from shardscope.memory.state.training_state import PeakCandidate, PeakTerms

if TYPE_CHECKING:
    from shardscope.frameworks.deepspeed.memory.activation_sizes import ActivationSizes
    from shardscope.frameworks.deepspeed.memory.element_counts import ElementCounts
    from shardscope.memory.activations.stage_activations import StageBackward


# ---- Peak candidates

_SAVED = ("saved by the layers", "saved by the final norm and for the head", "autocast's copies of weights")
_IN_NORM = (*_SAVED, "the final norm's gradients")
_IN_LAYER = ("saved by the remaining layers", "in addition inside one of them, gradients first")
_AFTER_LAYER = ("saved by the remaining layers", "gradients of one layer's input and output")
_AFTER_FEED_FORWARD = (
    "saved by the remaining layers",
    "saved by one layer's attention",
    "gradients of that attention's output and of the stream",
)
_IN_FIRST_NORM = ("saved by the remaining layers", "gradients inside one layer's first norm")
_IN_EMBEDDING = ("the gradient of the embedding's output",)
_NO_ACTIVATIONS = ("activations: all are freed",)
_IN_FORWARD = ("saved by the layers before",)
_INSIDE_FORWARD = ("saved by the layers before", "saved, and in use inside one layer")


def find_backward_peaks(
    counts: ElementCounts,
    backward: StageBackward,
    half: int,
    sizes: Sequence[ActivationSizes],
    buffers: ZeroBuffers,
) -> list[PeakCandidate]:
    """Return the peak candidates of the loss's and the layers' backward, and of all-gathers in forward.

    ``counts`` has ZeRO's phases in elements of ``half`` bytes, ``backward`` the saved tensors, ``sizes``
    those of layers with and without a sliding window, if they differ.
    """
    first, *others = (_BackwardPeaks(counts, backward, half, one, buffers) for one in sizes)
    has_scores = any(one.has_scores for one in sizes)
    peaks = first.find_all(has_scores=has_scores)
    for other in others:
        peaks += other.find_in_layers()
    return peaks


class _LayerPoint(NamedTuple):
    """Layer at which backward has arrived: the memory that its peak candidates share, in bytes."""

    num_passed: int
    """Number of layers that backward has passed."""
    fraction: float
    """Position in the step, 0 to 1."""
    phases: LayerPhases
    layer: LargestLayer
    saved: int
    """Saved by this layer and those before it in forward."""
    saved_before: int
    """Saved by the layers before it."""
    bucket: int
    """ipg bucket, as far as it is allocated during the feed-forward."""


class _BackwardPeaks:
    def __init__(
        self,
        counts: ElementCounts,
        backward: StageBackward,
        half: int,
        sizes: ActivationSizes,
        buffers: ZeroBuffers,
    ) -> None:
        self.counts, self.backward, self.half = counts, backward, half
        self.sizes, self.buffers = sizes, buffers
        self.saved = (backward.saved_by_layers, backward.saved_by_head, backward.weight_casts)
        # The bucket, if it is allocated before the first gradient.
        self.permanent_bucket = (buffers.after_forward > 0) * buffers.bucket
        self.bucket_at_head = where(buffers.head_is_first, buffers.bucket, self.permanent_bucket)
        self.largest_layer = backward.find_largest_layer(sizes.windowed)
        self.has_experts = self.largest_layer.at_expert_weights != self.largest_layer.at_product

    def find_in_layers(self) -> list[PeakCandidate]:
        """Return the candidates in the layers' backward."""
        if self.sizes.windowed is None:
            return [peak for chosen in self._choose_layers() for peak in self._find_layer_peaks(*chosen)]
        peaks: list[PeakCandidate] = []
        for exists, num_passed, phases in self._choose_layers_by_window():
            in_layer = self._find_layer_peaks(num_passed, phases)
            peaks += in_layer if exists is True else [peak.keep_where(exists) for peak in in_layer]
        return peaks

    def find_all(self, *, has_scores: bool) -> list[PeakCandidate]:
        """Return the candidates in the order of backward, then those of forward.

        ``has_scores``: whether any layer materializes attention scores.
        """
        counts = self.counts
        peaks = [*self._find_head_peaks(), *self.find_in_layers()]
        at_embedding = counts.backward.embedding
        peaks.append(
            self._build_candidate(0.97, (self.backward.stream_gradient,), _IN_EMBEDDING, at_embedding)
        )
        peaks += [
            self._build_candidate(0.975, (0,), _NO_ACTIVATIONS, phase) for phase in counts.final_reduction
        ]
        if has_scores:
            peaks += self._find_forward_score_peaks()
        if self.buffers.gathers_in_forward or self.sizes.fetches_one_by_one:
            peaks.append(self._find_forward_peak())
        return peaks

    def _build_candidate(
        self,
        fraction: float,
        activations: tuple[int, ...],
        explanations: tuple[str, ...],
        elements: PhaseElements,
        bucket: int | None = None,
        logits: Term | None = None,
        phase: Phase = "backward",
    ) -> PeakCandidate:
        """Return a candidate; ``bucket``: the bytes allocated for it by then, all unless given."""
        bucket_bytes = self.buffers.bucket if bucket is None else bucket
        staging, gradients = elements
        return PeakCandidate(
            fraction,
            sum(activations),
            self.buffers.in_pipeline + bucket_bytes + self.half * staging,
            self.buffers.earlier_gradients + self.half * gradients,
            partial(self._explain_candidate, activations, explanations, elements, bucket_bytes),
            logits,
            phase,
        )

    def _explain_candidate(
        self,
        activations: tuple[int, ...],
        explanations: tuple[str, ...],
        elements: PhaseElements,
        bucket_bytes: int,
    ) -> PeakTerms:
        """Return the candidate's bytes as terms, with their explanations."""
        half, earlier = self.half, self.buffers.earlier_gradients
        staged = f"{elements.staging:,} elements × {half} bytes all-gathered, unreduced or copied"
        reduced = f"{elements.gradients:,} elements × {half} bytes reduced or accumulated so far"
        has_saved = explanations not in (_IN_EMBEDDING, _NO_ACTIVATIONS)
        return PeakTerms(
            sum_parts(
                *zip(activations, explanations, strict=True),
                source=self.backward.explain_layers if has_saved else None,
            ),
            self._add_pipeline(
                sum_parts((bucket_bytes, "bucket (reduce_bucket_size)"), (half * elements.staging, staged))
            ),
            sum_parts((earlier, "of earlier micro-batches"), (half * elements.gradients, reduced)),
        )

    def _add_pipeline(self, staging: Term) -> Term:
        """Return the term of buckets and staging with the pipeline's buffers, if there are any."""
        num_bytes = self.buffers.in_pipeline
        if not num_bytes:
            return staging
        return Term(
            staging.num_bytes + num_bytes, lambda: f"{staging.explain()} + {explain_buffers(num_bytes)}"
        )

    def _find_head_peaks(self) -> list[PeakCandidate]:
        """Return the candidates at the loss, the head and the final norm: all saved tensors exist."""
        counts, buffers, sizes = self.counts, self.buffers, self.sizes
        head_logits = Term(
            sizes.logits, lambda: f"{format_gib(sizes.logits)} GiB, the gradient of the logits"
        )

        def explain_loss() -> PeakTerms:
            return PeakTerms(
                sum_parts(*zip(self.saved, _SAVED, strict=True), source=self.backward.explain_layers),
                self._add_pipeline(
                    self._explain_elements(buffers.after_forward, "all-gathered, or the bucket")
                ),
                self._explain_elements(buffers.gradients_at_loss, "of earlier micro-batches"),
            )

        # At the loss; at the head's gradients, with the logits' gradient and without; at the final norm.
        at_norm = (*self.saved, self.backward.in_final_norm)
        norm_bucket = buffers.bucket if buffers.trains_all else self.bucket_at_head
        return [
            PeakCandidate(
                0.34,
                sum(self.saved),
                buffers.in_pipeline + buffers.after_forward,
                buffers.gradients_at_loss,
                explain_loss,
                self.backward.logits,
            ),
            self._build_candidate(
                0.345, self.saved, _SAVED, counts.backward.head_at_logits, self.permanent_bucket, head_logits
            ),
            self._build_candidate(0.347, self.saved, _SAVED, counts.backward.head.peak, self.bucket_at_head),
            self._build_candidate(0.35, at_norm, _IN_NORM, counts.backward.head.first_gradient, norm_bucket),
        ]

    def _explain_elements(self, num_bytes: int, what: str) -> Term:
        half = self.half
        return Term(
            num_bytes, lambda: f"{num_bytes // half:,} × {half} bytes {what}" if num_bytes else "none yet"
        )

    def _choose_layers(self) -> list[tuple[int, LayerPhases]]:
        """Return (layers that backward has passed, ZeRO's phases) of the layers that can have the peak."""
        phases, num_layers, interval = self.counts.backward, self.sizes.num_layers, self.sizes.interval
        chosen = list(zip(list_candidate_depths(num_layers - 1), phases.layers, strict=False))
        largest = phases.layers_before_largest
        if is_array(largest) or 1 < largest < num_layers - 1:
            chosen.append((largest, phases.layers[3]))
        if interval > 2:
            # The first recomputed layer in backward order may be neither of the first two.
            chosen.append(((num_layers - 1) % interval, phases.layers[1]))
        return chosen

    def _choose_layers_by_window(self) -> list[tuple[bool, int, LayerPhases]]:
        """Return the same as :meth:`_choose_layers` for layers with a window, or for those without one.

        The first value is whether the stage has such a layer.
        """
        last_index = self.sizes.num_layers - 1
        counts = self.counts.backward
        first_phases, second_phases, last_phases, largest_phases, unwindowed_phases = counts.layers
        largest = counts.layers_before_largest
        order = self.backward.layer_order
        chosen: list[tuple[bool, int, LayerPhases]] = []
        for kind in order.kinds:
            exists = kind.num_layers > 0
            if kind.pattern is None or kind.pattern.windowed != self.sizes.windowed or exists is False:
                continue
            first, last = minimum(kind.first_index, last_index), maximum(kind.last_index, 0)
            phases = where(last == last_index, first_phases, second_phases)
            chosen.append((exists, last_index - last, phases))
            phases = last_phases if self.sizes.windowed else unwindowed_phases
            chosen.append((exists, last_index - first, phases))
            has_largest = exists & order.is_kind_at(kind, last_index - largest)
            if has_largest is not False:
                chosen.append((has_largest, largest, largest_phases))
        return chosen

    def _find_layer_peaks(self, num_passed: int, phases: LayerPhases) -> list[PeakCandidate]:
        """Return the candidates in the layer that follows ``num_passed`` layers in backward."""
        sizes, backward = self.sizes, self.backward
        num_layers = sizes.num_layers
        layer = self.largest_layer
        saved = _count_remaining(backward.saved_by_layers, layer.saved, num_layers, num_passed)
        if sizes.interval > 1 or sizes.windowed is not None:
            layer, saved = self._find_layer_at(layer, num_layers - 1 - num_passed)
        point = _LayerPoint(
            num_passed,
            # Layers take the timeline from 0.36 to 0.96; small offsets order the candidates of one layer.
            0.36 + 0.6 * num_passed / num_layers,
            phases,
            layer,
            saved,
            maximum(0, saved - layer.saved),
            self._find_bucket_bytes(num_passed, has_gradient=sizes.adapts_down),
        )
        after_layer = self._build_candidate(
            point.fraction + 0.01,
            (point.saved_before, 2 * backward.stream_gradient),
            _AFTER_LAYER,
            phases.peak,
        )
        if sizes.fetches_one_by_one:
            fetches = self._find_fetch_phases(phases, num_layers - 1 - num_passed)
            return [
                *(
                    self._build_candidate(point.fraction, activations, _IN_LAYER, elements, point.bucket)
                    for activations, elements in fetches
                ),
                after_layer,
            ]
        return [
            *self._find_recomputation_peaks(point),
            *self._find_feed_forward_peaks(point),
            *self._find_score_peak(point),
            after_layer,
            *self._find_attention_peaks(point),
        ]

    def _find_bucket_bytes(self, num_passed: int, *, has_gradient: bool) -> int:
        """Return the bytes of the bucket in the layer after ``num_passed`` layers.

        ``has_gradient``: whether an adapter of this layer has its gradient by then.
        """
        # It is allocated at the first gradient; with adapters mostly after the last feed-forward.
        if self.buffers.trains_all or has_gradient:
            return self.buffers.bucket
        has_bucket = (num_passed > 0) | self.buffers.head_is_first
        return where(has_bucket, self.buffers.bucket, self.permanent_bucket)

    def _find_recomputation_peaks(self, point: _LayerPoint) -> list[PeakCandidate]:
        """Return the candidates at the maximum of the layer's recomputation, one for each kind of layer."""
        order = self.backward.layer_order
        kinds = [kind for kind in order.kinds if any_true(kind.recomputation)]
        if not kinds:
            return []
        index = self.sizes.num_layers - 1 - point.num_passed
        unsaved = (index == 0) * self.sizes.unsaved
        bucket = self._find_bucket_bytes(point.num_passed, has_gradient=False)
        return [
            self._build_candidate(
                point.fraction - 0.002,
                (point.saved_before, where(order.is_kind_at(kind, index), kind.recomputation - unsaved, 0)),
                _IN_LAYER,
                point.phases.first_gradient,
                bucket,
            )
            for kind in kinds
        ]

    def _find_feed_forward_peaks(self, point: _LayerPoint) -> list[PeakCandidate]:
        """Return the candidates at the layer's own maximum and at its feed-forward's gradients."""
        sizes, trains_all, has_experts = self.sizes, self.buffers.trains_all, self.has_experts
        layer, phases, saved = point.layer, point.phases, point.saved
        fraction, bucket = point.fraction, point.bucket
        is_last = point.num_passed == sizes.num_layers - 1
        # At the feed-forward's maximum, its product.
        inside = (saved, layer.at_product - is_last * sizes.unsaved)
        peaks = [self._build_candidate(fraction, inside, _IN_LAYER, phases.after_down, bucket)]
        if any_true(has_experts):
            has_rows = has_experts & (point.num_passed < sizes.num_moe_layers)
            at_rows = layer.at_expert_rows - is_last * sizes.unsaved
            inside = (where(has_rows, saved, 0), where(has_rows, at_rows, 0))
            peaks.append(self._build_candidate(fraction, inside, _IN_LAYER, phases.at_experts, bucket))
        if any_true(layer.at_norm_after):
            inside = (saved, layer.at_norm_after)
            peaks.append(self._build_candidate(fraction, inside, _IN_LAYER, phases.first_gradient, bucket))
        if trains_all:
            # At the gradient of the down projection, whose input, the product, is still alive.
            with_product = layer.at_product - sizes.freed[0] + sizes.product
            inside = (where(has_experts, 0, saved), where(has_experts, 0, with_product))
            staging, gradients = phases.first_gradient
            at_down = PhaseElements(staging + sizes.down_projection, gradients)
            peaks.append(self._build_candidate(fraction + 0.002, inside, _IN_LAYER, at_down, bucket))
        is_first = point.num_passed == 0
        # By identity: for arrays the comparison gives an array, which has no single truth value.
        if is_first is not False and any_true(sizes.adapter_inputs):
            # The bucket is allocated by then, at the first gradient.
            inside = (is_first * saved, where(has_experts, 0, is_first * sizes.adapter_inputs))
            peaks.append(self._build_candidate(fraction + 0.003, inside, _IN_LAYER, phases.first_gradient))
        # At the gradient of a feed-forward matrix, when some saved tensors have been freed.
        freed, in_feed_forward = self._choose_feed_forward_matrix(phases.feed_forward)
        in_dense = layer.at_product - freed
        in_experts = layer.at_expert_weights if trains_all else layer.at_product
        # Stage 3 reduces a leaf's gradients after its backward.
        in_experts += self.buffers.gathers_in_forward * sizes.leaf_rows
        # A layer without experts, after layers with experts, cannot free more than is left.
        inside = (saved, maximum(where(has_experts, in_experts, in_dense), -saved))
        elements = where(has_experts & trains_all, phases.last_feed_forward, in_feed_forward)
        peaks.append(self._build_candidate(fraction + 0.004, inside, _IN_LAYER, elements, bucket))
        return peaks

    def _find_score_peak(self, point: _LayerPoint) -> list[PeakCandidate]:
        """Return the candidate at attention's scores, if they are materialized."""
        if not self.sizes.has_scores:
            return []
        sizes = self.sizes
        is_last = point.num_passed == sizes.num_layers - 1
        inside = (point.saved, maximum(point.layer.at_scores - is_last * sizes.unsaved, -point.saved))
        bucket = self._find_bucket_bytes(point.num_passed, has_gradient=sizes.adapts_before_scores)
        elements = point.phases.before_attention
        return [self._build_candidate(point.fraction + 0.006, inside, _IN_LAYER, elements, bucket)]

    def _find_attention_peaks(self, point: _LayerPoint) -> list[PeakCandidate]:
        """Return the candidates when the layer's feed-forward has freed all that it saved."""
        sizes, trains_all, phases = self.sizes, self.buffers.trains_all, point.phases
        peaks: list[PeakCandidate] = []
        # Between the feed-forward and attention.
        if trains_all:
            inside = (point.saved_before, sizes.attention, 2 * self.backward.stream_gradient)
            at_attention = self._build_candidate(
                point.fraction + 0.008, inside, _AFTER_FEED_FORWARD, phases.attention_output
            )
            peaks.append(at_attention)
        # In the first norm. With frozen embeddings no gradient reaches the first layer's.
        is_reached = trains_all | (point.num_passed + 1 < sizes.num_layers)
        in_norm = (is_reached * point.saved_before, is_reached * sizes.first_norm)
        peaks.append(
            self._build_candidate(point.fraction + 0.012, in_norm, _IN_FIRST_NORM, phases.next_layer)
        )
        return peaks

    def _find_layer_at(self, fullest: LargestLayer, index: int) -> tuple[LargestLayer, int]:
        """Return the layer at ``index`` if only some are recomputed, and the bytes saved up to and by it."""
        order = self.backward.layer_order
        before, with_it = (order.sum_before(end, lambda kind: kind.saved) for end in (index, index + 1))
        outside = self.backward.saved_by_layers - order.sum_before(order.num_layers, lambda kind: kind.saved)
        change = 0
        if self.sizes.interval > 1:
            change = (index % self.sizes.interval == 0) * fullest.most_recomputed - fullest.recomputed
        layer = fullest._replace(
            saved=with_it - before,
            at_product=fullest.at_product + change,
            at_expert_weights=fullest.at_expert_weights + change,
            at_scores=fullest.at_scores + (fullest.at_scores != 0) * change,
            at_expert_rows=fullest.at_expert_rows + change,
            at_norm_after=fullest.at_norm_after + (fullest.at_norm_after != 0) * change,
        )
        return layer, outside + with_it

    def _find_fetch_phases(
        self, phases: LayerPhases, index: int
    ) -> list[tuple[tuple[int, int], PhaseElements]]:
        """Return the phases of the layer at ``index`` if offloaded activations are fetched one by one.

        Each is ((bytes of the layers before, bytes in the layer), ZeRO's elements). The phases are those of
        the layer's backward in ``memory/activations``.
        """
        order = self.backward.layer_order
        outside = self.backward.saved_by_layers - order.sum_before(order.num_layers, lambda kind: kind.saved)
        before = maximum(0, outside + order.sum_before(index, lambda kind: kind.saved))
        fetches: list[tuple[tuple[int, int], PhaseElements]] = []
        for kind in order.kinds:
            # A layer without this kind's experts, window or offloading has none of its phases.
            is_kind = order.is_kind_at(kind, index)
            if is_kind is False:
                continue
            # Its gradient is copied by then, and stage 3 has released the all-gathered matrix.
            copies = self.buffers.trains_all + self.buffers.gathers_in_forward
            down_projection = copies * self.sizes.down_projection
            all_elements = list_layer_elements(phases, kind, down_projection)
            for peak, elements in zip(kind.backward, all_elements, strict=True):
                # A phase cannot free more than is left: with short sequences over many ranks its bytes are 0.
                in_layer = maximum(where(is_kind, peak.activations, -before), -before)
                fetches.append(((before, in_layer), elements))
        return fetches

    def _choose_feed_forward_matrix(self, matrices: Sequence[PhaseElements]) -> tuple[int, PhaseElements]:
        """Return the bytes freed and ZeRO's elements at the feed-forward matrix with the largest total."""
        rows = [
            (self.half * elements.total - freed, freed, elements)
            for freed, elements in zip(self.sizes.freed, matrices, strict=False)
        ]
        _, freed, elements = pick_largest_row(rows)
        return freed, elements

    def _find_forward_score_peaks(self) -> list[PeakCandidate]:
        """Return the candidates at attention's scores in forward, in the last layer of each kind."""
        num_layers, elements = self.sizes.num_layers, 0
        for num_passed, gathered in self.counts.gathered_in_forward:
            elements = where(num_passed >= num_layers - 1, gathered, elements)
        return [
            self._build_candidate(
                0.02 + 0.3 * (layer.position + 1) / num_layers,
                (layer.saved_before, layer.kind.forward),
                _INSIDE_FORWARD,
                PhaseElements(elements, 0),
                self.permanent_bucket,
                phase="forward",
            )
            for layer in self.backward.layer_order.find_last_layers(self.backward.saved_by_layers)
        ]

    def _find_forward_peak(self) -> PeakCandidate:
        """Return the candidate in forward with the most all-gathered and saved bytes together."""
        half, num_layers, layers = self.half, self.sizes.num_layers, self.backward.saved_by_layers
        num_passed, elements = self.counts.gathered_in_forward[0]
        for other_passed, other in self.counts.gathered_in_forward[1:]:
            other_total = half * other + layers * other_passed // num_layers
            is_larger = other_total > half * elements + layers * num_passed // num_layers
            num_passed = where(is_larger, other_passed, num_passed)
            elements = where(is_larger, other, elements)
        activations: tuple[int, ...] = (layers * num_passed // num_layers,)
        explanations: tuple[str, ...] = _IN_FORWARD
        if self.sizes.fetches_one_by_one and self.sizes.interval == 1:
            # Nothing is saved, so that what is in use inside of a layer counts.
            kinds = self.backward.layer_order.kinds
            activations += (maximum(*(where(kind.num_layers > 0, kind.forward, 0) for kind in kinds)),)
            explanations = (*explanations, "in use inside one layer")
        # Stages 1 and 2 allocate the bucket in backward.
        bucket = None if self.buffers.gathers_in_forward else self.permanent_bucket
        fraction = 0.02 + 0.3 * num_passed / num_layers
        return self._build_candidate(
            fraction, activations, explanations, PhaseElements(elements, 0), bucket, phase="forward"
        )


def _count_remaining(layers: int, saved: int, num_layers: int, num_passed: int) -> int:
    """Return the saved bytes left of ``layers`` after the backward of ``num_passed``, the largest first."""
    remaining = layers - num_passed * saved
    # With two kinds of layers the larger one is subtracted for both; use the mean where that is too much.
    return where(remaining > 0, remaining, layers // num_layers * (num_layers - num_passed))
