"""Peak candidates of FSDP2 in a pipeline stage; ``pipeline_buffers.py`` says what differs from one stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from shardscope.core.ops import is_array, maximum, where
from shardscope.frameworks.fsdp2.memory import explanations
from shardscope.frameworks.fsdp2.memory.peaks import StepPeaks
from shardscope.memory.report import Term
from shardscope.memory.state.training_state import PeakCandidate

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.frameworks.fsdp2.memory.groups import LayerGroups, StageGroups
    from shardscope.frameworks.fsdp2.memory.pipeline_buffers import PipelineBuffers
    from shardscope.memory.activations.layer_order import StageLayer
    from shardscope.memory.activations.stage_activations import StageBackward
    from shardscope.memory.state.stages import Stage


class PipelinePeaks(StepPeaks):
    """Peak candidates of a pipeline stage: micro-batches in flight, gradients reduced after the schedule."""

    def __init__(
        self,
        plan: Plan,
        stage: Stage,
        backward: StageBackward,
        groups: StageGroups,
        trained: int,
        buffers: PipelineBuffers,
    ) -> None:
        super().__init__(plan, stage, backward, groups, trained)
        self.buffers = buffers
        self.received, self.sent, self.unreduced = buffers.received, buffers.sent, buffers.unreduced
        # With embedding and head on different stages, each stage has its own copy of a tied weight.
        self.tied_head_gradient, self.head_gradient = 0, groups.head_gradient
        self.adds_gradients = where(buffers.repeats, buffers.adds_gradients, True)
        """Whether new gradients are separate tensors from accumulated ones; always for the first ones."""
        self.learns_positions = plan.architecture.position_embedding == "learned"
        self.saved_by_chunk = backward.saved_by_layers // buffers.chunks_in_flight
        """Saved tensors of one micro-batch's layers. Bytes."""
        self.sent_gradient = buffers.repeats * buffers.hidden_gradient
        self.output = buffers.build_output(1)
        """The last stage's output, which the schedule keeps."""

    def list_candidates(self) -> list[PeakCandidate]:
        """Return the candidates of :class:`StepPeaks`, and those of later micro-batches and reductions."""
        buffers, order = self.buffers, self.backward.layer_order
        candidates = [
            self._build_first(),
            *self._list_loss_and_norm(),
            *self._list_root(),
            *self._list_reductions(),
        ]
        # Forwards, and the backwards that follow a backward.
        for layer in order.find_last_layers(self.backward.saved_by_layers):
            candidates += self._list_in_forward(layer)
            candidates += _build_where(buffers.repeats, self._build_later_forward, layer)
            # At the last layers the saved tensors are largest, and all layers are all-gathered anyway.
            candidates += _build_where(buffers.chunks_in_flight > 1, self._build_later_backward, layer)
        # Backwards that follow a forward. The maximum inside of a layer is computed once for each kind.
        peaks: dict[int, tuple[int, int]] = {}
        for layer in order.find_peak_layers(self.backward.saved_by_layers, self._compute_growth):
            kind = id(layer.kind)
            is_first_of_kind = kind in peaks and layer.position == layer.kind.first_index
            if kind not in peaks:
                peaks[kind] = self._find_layer_peak(layer, self.adds_gradients)
            # In an array of plans each layer has its own kind.
            if is_array(layer.kind.num_layers) or is_array(layer.position) or is_first_of_kind:
                # The first layer of a kind, where most of its layers are all-gathered.
                candidates += _build_where(buffers.repeats, self._build_later_forward, layer)
            candidates += self._list_in_backward(layer, *peaks[kind])
        return candidates

    def _compute_growth(self, moe: bool) -> int:
        group = self.groups.experts if moe else self.groups.dense
        # A layer's parameters and gradients stay after its backward; from the second micro-batch on the
        # gradients exist already.
        unsharded = where(self.buffers.repeats, 0, group.unsharded_gradient)
        return group.parameters + unsharded - group.kept_after_forward

    def _sum_reduced(self, unreduced_shards: int) -> int:
        """Return 0 bytes: no gradient is reduced before the schedule has ended."""
        return 0 * unreduced_shards

    def _sum_later_parameters(self, groups: LayerGroups) -> int:
        """Return the all-gathered parameters of all layers after the one with ``groups``."""
        return self.all_layers.parameters - groups.before.parameters - groups.own.parameters

    def _build_later_forward(self, layer: StageLayer) -> PeakCandidate:
        """Return the candidate of a forward after a backward: this and all later layers are all-gathered."""
        groups = self.groups.get_layer(layer.position)
        # The layers before have had this forward and are resharded as planned; those after it still have the
        # parameters of the last backward.
        gathered = (
            self.groups.root,
            self.unreduced,
            self.received,
            groups.before.kept_after_forward + self._sum_later_parameters(groups),
            0,
            groups.own.parameters,
            0,
        )
        return self._build_candidate(
            0.02 + 0.3 * (layer.position + 1) / self.stage.num_layers,
            (layer.saved_before, self.sent + self.sent_gradient, layer.kind.forward),
            gathered,
            self.no_gradients,
            explanations.IN_FORWARD,
            self.output,
            "forward",
        )

    def _list_loss_and_norm(self) -> list[PeakCandidate]:
        backward, buffers = self.backward, self.buffers
        # This micro-batch's hidden states, too: the schedule keeps them until its backward.
        sent = self.sent + buffers.hidden + self.sent_gradient
        saved = (backward.saved_by_layers, backward.saved_by_head, backward.weight_casts, sent)
        gathered = (self.groups.root, self.unreduced, self.received, self.all_layers.kept_after_forward, 0)
        logits = buffers.add_output(backward.logits)
        # A pipeline computes the loss outside the root module, so nothing is all-gathered for it.
        return [
            self._build_candidate(0.34, saved, (*gathered, 0), 0, explanations.AT_LOSS, logits),
            self._build_candidate(
                0.35,
                (*saved, backward.in_final_norm, 0),
                (*gathered, self.head_gradient, self._get_last_output()),
                0,
                explanations.IN_NORM,
                buffers.build_output(2),
            ),
        ]

    def _list_in_backward(
        self, layer: StageLayer, peak_activations: int, weights_with_gradient: int
    ) -> list[PeakCandidate]:
        """Return the candidates of one layer's backward.

        Unlike without stages, layers whose backward is done stay all-gathered and their gradients unsharded.
        """
        backward, buffers, num_layers = self.backward, self.buffers, self.stage.num_layers
        groups = self.groups.get_layer(layer.position)
        group, next_group, before = groups
        fraction = 0.36 + 0.6 * (num_layers - 1 - layer.position) / num_layers
        # In the first backward, gradients of the layers whose backward is done; later, all of them.
        new_gradients = (
            self.all_layers.unsharded_gradient - before.unsharded_gradient - group.unsharded_gradient
        )
        around_layer = (
            self.groups.root,
            where(buffers.repeats, buffers.all_gradients, new_gradients),
            buffers.received,
            self.adds_gradients * self.head_gradient,
            before.kept_after_forward,
            self._sum_later_parameters(groups),
        )
        saved = (layer.saved_before, 0, self.sent + buffers.hidden + self.sent_gradient)
        prefetched, pending = self._compute_all_gathers(group, next_group)
        with_layer = (*around_layer, group.parameters, 0)
        layer_gradients = where(
            buffers.repeats,
            self.adds_gradients * self.compute * layer.kind.weights,
            group.unsharded_gradient,
        )
        return [
            self._build_candidate(
                fraction - 0.005,
                (*saved, layer.kind.saved, backward.stream_gradient),
                (*with_layer, pending),
                0,
                explanations.BEFORE_LAYER,
                self.output,
            ),
            self._build_candidate(
                fraction,
                (*saved, peak_activations),
                (*with_layer, prefetched, self.compute * weights_with_gradient),
                0,
                explanations.IN_LAYER,
                self.output,
            ),
            self._build_candidate(
                fraction + 0.01,
                (*saved, 2 * backward.stream_gradient),
                (*around_layer, prefetched, group.parameters, layer_gradients),
                0,
                explanations.AFTER_LAYER,
                self.output,
            ),
        ]

    def _build_later_backward(self, layer: StageLayer) -> PeakCandidate:
        """Return the candidate of a backward after a backward.

        One micro-batch fewer is in flight, and all layers are all-gathered.
        """
        buffers, num_layers = self.buffers, self.stage.num_layers
        activations, weights = self._find_layer_peak(layer, buffers.adds_gradients)
        gathered = (
            self.groups.root,
            buffers.all_gradients,
            buffers.received,
            buffers.adds_gradients * self.head_gradient,
            self.all_layers.parameters,
            *(0, 0, 0, 0),
            self.compute * weights,
        )
        # The micro-batch whose backward came before is no longer in flight.
        saved_before = maximum(0, layer.saved_before - self.saved_by_chunk)
        sent = self.sent - buffers.saved_by_head + buffers.hidden_gradient
        return self._build_candidate(
            0.361 + 0.6 * (num_layers - 1 - layer.position) / num_layers,
            (saved_before, 0, sent, activations),
            gathered,
            0,
            explanations.IN_LAYER,
            self.output,
        )

    def _list_root(self) -> list[PeakCandidate]:
        """Return the candidates at the embedding's gradient and at the casts of the first root gradients."""
        backward, groups, buffers = self.backward, self.groups, self.buffers
        gradients = where(buffers.repeats, buffers.all_gradients, self.all_layers.unsharded_gradient)
        until_end = buffers.received + gradients + self.all_layers.parameters
        # The head's gradient was accumulated at the start of this backward.
        root_gradient = groups.root_gradient - (1 - self.adds_gradients) * groups.head_gradient
        other_chunks = self.saved_by_chunk * (buffers.chunks_in_flight - 1)
        sent = self.sent + buffers.hidden
        in_flight = other_chunks + sent + self.sent_gradient
        candidates = [
            self._build_candidate(
                0.97,
                (backward.stream_gradient, 0, groups.embedding_gradient, in_flight),
                (groups.root, root_gradient, 0, until_end),
                0,
                explanations.IN_EMBEDDING,
                self.output,
            )
        ]
        if buffers.repeats is not True:
            # In the first backward the root's gradients are cast one after another to the reduction type
            # (to_accumulated_grad_if_needed), while all of them exist in the compute type.
            casts = buffers.adds_gradients * (buffers.all_gradients - self.all_layers.unsharded_gradient)
            first_casts = self._build_candidate(
                0.972,
                (other_chunks, sent + buffers.hidden_gradient),
                (groups.root, groups.root_gradient + casts, until_end),
                0,
                explanations.IN_LAST_CAST,
                self.output,
            )
            if buffers.repeats is not False:
                first_casts = _zero_unless(1 - buffers.repeats, first_casts)
            candidates.append(first_casts)
        return candidates

    def _list_reductions(self) -> list[PeakCandidate]:
        """Return the candidates after the schedule: each group reshards, then reduces its gradients.

        The root comes first, then the layers in forward order; the first layer of each kind has the maximum.
        """
        groups, buffers = self.groups, self.buffers
        has_shards, sent = self.trained > 0, (buffers.hidden + buffers.hidden_gradient,)
        root = (
            self.all_layers.parameters,
            buffers.all_gradients,
            groups.root_reduce_scatter_input,
            buffers.received,
        )
        # With several ranks the loop variable in foreach_reduce still references the last gradient of its
        # list when the output is allocated: the only one, unless learned positions follow.
        references_last = (groups.root_all_gather_output > 0) * (not self.learns_positions)
        output = has_shards * references_last * groups.root_gradient_shard
        candidates = [self._build_candidate(0.975, sent, root, output, explanations.REDUCING, self.output)]
        first_with_experts, last = groups.first_with_experts, self.stage.num_layers - 1
        firsts: tuple[int, ...] = (0, where(first_with_experts < last, first_with_experts, last))
        if not is_array(first_with_experts) and not 0 < first_with_experts <= last:
            firsts = (0,)
        for position in firsts:
            layer = groups.get_layer(position)
            gathered = (
                self._sum_later_parameters(layer),
                self.all_layers.unsharded_gradient - layer.before.unsharded_gradient,
                layer.own.reduce_scatter_input,
                buffers.received,
            )
            gradients = has_shards * (groups.root_gradient_shard + layer.before.gradient_shard)
            candidates.append(
                self._build_candidate(0.976, sent, gathered, gradients, explanations.REDUCING, self.output)
            )
        return candidates


def _build_where(
    condition: bool, build: Callable[[StageLayer], PeakCandidate], layer: StageLayer
) -> list[PeakCandidate]:
    """Return the candidate if the condition is true; for an array of plans, zeroed where it is false."""
    if is_array(condition):
        return [_zero_unless(condition, build(layer))]
    return [build(layer)] if condition else []


def _zero_unless(condition: int, candidate: PeakCandidate) -> PeakCandidate:
    """Return the candidate with zeros in the array rows where the condition is false."""
    logits = candidate.logits
    return PeakCandidate(
        candidate.fraction,
        condition * candidate.activations,
        condition * candidate.gather,
        condition * candidate.gradients,
        candidate.find_terms,
        None if logits is None else Term(condition * logits.num_bytes, logits.explain),
        candidate.phase,
    )
