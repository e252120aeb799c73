"""Peak candidates of an FSDP2 step in a pipeline stage, extending those of ``peaks.py``.

Source: ``torch.distributed.pipelining`` (torch 2.13). ``backward_maybe_with_nosync`` neither reduces
gradients nor reshards a layer, the following forward reshards the layers one by one, and
``perform_reduce_grad`` reduces every group when the schedule has ended, the root first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardscope.core.ops import is_array, maximum, where
from shardscope.frameworks.fsdp2.memory import words as said
from shardscope.frameworks.fsdp2.memory.peaks import Step
from shardscope.frameworks.fsdp2.memory.pipeline import NOTHING_WAITS, Waiting
from shardscope.memory.report import Term
from shardscope.memory.state.training_state import PeakCandidate

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardscope.core.plan import Plan
    from shardscope.frameworks.fsdp2.memory.groups import StageGroups
    from shardscope.memory.activations.stage_activations import StageBackward, StageLayer
    from shardscope.memory.state.stages import Stage


def peaks(
    plan: Plan, stage: Stage, shape: StageBackward, groups: StageGroups, waits: Waiting, trained: Any
) -> list[PeakCandidate]:
    """Return the peak candidates of a step.

    They cover the layers in forward, the loss, the final norm, the layers in backward, the embedding and the
    reduce-scatters.
    """
    if waits is NOTHING_WAITS:
        return Step(plan, stage, shape, groups, waits, trained).peaks()
    return StagedStep(plan, stage, shape, groups, waits, trained).peaks()


def _only(here: Any, peak: PeakCandidate) -> PeakCandidate:
    """Return ``peak`` with zeros in the array rows where ``here`` is false."""
    logits = peak.logits
    return PeakCandidate(
        peak.fraction,
        here * peak.activations,
        here * peak.gather,
        here * peak.gradients,
        peak.find_terms,
        None if logits is None else Term(here * logits[0], logits.explain),
        peak.phase,
    )


class StagedStep(Step):
    """Peak candidates of a pipeline stage: micro-batches in flight, gradients reduced after the schedule."""

    def __init__(
        self,
        plan: Plan,
        stage: Stage,
        shape: StageBackward,
        groups: StageGroups,
        waits: Waiting,
        trained: Any,
    ) -> None:
        super().__init__(plan, stage, shape, groups, waits, trained)
        # With embedding and head on different stages, each stage has its own copy of a tied weight.
        self.held_head, self.own_head = 0, groups.head
        self.adds = where(waits.repeats, waits.adds, True)
        """Whether new gradients are separate tensors from accumulated ones; always for the first ones."""
        self.learns_positions = plan.architecture.position_embedding == "learned"
        self.chunk = shape.saved_by_layers // waits.chunks
        """Saved tensors of one micro-batch's layers. Bytes."""
        self.back = waits.repeats * waits.hidden_back
        self.stays = waits.output(1)

    def peaks(self) -> list[PeakCandidate]:
        waits = self.waits
        order = self.shape.find_layer_order()
        found = [self._first(), *self._loss_and_norm(), *self._root(), *self._reductions()]
        for place in order.find_last_layers(self.shape.saved_by_layers):
            found += self._forward(place)
            found += self._where(waits.repeats, self._forward_again, place)
            # At the last layers the saved tensors are largest, and all layers are all-gathered anyway.
            found += self._where(waits.chunks > 1, self._backward_again, place)
        fullest: dict[int, tuple[Any, Any]] = {}
        for place in order.find_peak_layers(self.shape.saved_by_layers, self._growth):
            kind = id(place.kind)
            is_other_end = kind in fullest and place.position == place.kind.first_index
            if kind not in fullest:
                fullest[kind] = self._fullest(place, self.adds)
            # In an array of plans each place has its own kind.
            if is_array(place.kind.num_layers) or is_array(place.position) or is_other_end:
                # The lowest layer of a kind, where most of its layers are all-gathered.
                found += self._where(waits.repeats, self._forward_again, place)
            found += self._layer(place, *fullest[kind])
        return found

    def _where(
        self, there: Any, find: Callable[[StageLayer], PeakCandidate], place: StageLayer
    ) -> list[PeakCandidate]:
        """Return the candidate of ``find`` if ``there``; for an array of plans, zeroed where it is false."""
        if is_array(there):
            return [_only(there, find(place))]
        return [find(place)] if there else []

    def _growth(self, moe: bool) -> Any:
        group = self.groups.experts if moe else self.groups.dense
        return group.parameters + where(self.waits.repeats, 0, group.gradient) - group.kept

    def _gradients(self, before: Any) -> Any:
        """Return 0 bytes: no gradient is reduced before the schedule has ended."""
        return 0 * before

    def _forward_again(self, place: StageLayer) -> PeakCandidate:
        """Return the candidate of a forward after a backward: this and all later layers are all-gathered."""
        groups, waits, index = self.groups, self.waits, place.position
        group, gone = groups.at(index), groups.before(index)
        later = self.in_layers.parameters - gone.parameters - group.parameters
        held = (place.saved_before, waits.sent + self.back, place.kind.forward)
        gathered = (*self.waiting, gone.kept + later, 0, group.parameters, 0)
        return self._peak(
            0.02 + 0.3 * (index + 1) / self.stage.num_layers,
            held,
            gathered,
            self.none,
            said.IN_FORWARD,
            self.stays,
            "forward",
        )

    def _loss_and_norm(self) -> list[PeakCandidate]:
        shape, waits = self.shape, self.waits
        full = (
            shape.saved_by_layers,
            shape.saved_by_head,
            shape.weight_casts,
            waits.sent + waits.hidden + self.back,
        )
        gathered = (*self.waiting, self.in_layers.kept, 0)
        prefetched = 0 if self.whole else self.groups.at(self.stage.num_layers - 1).staging
        # A pipeline computes the loss outside the root module, so nothing is all-gathered for it.
        return [
            self._peak(0.34, full, (*gathered, 0), 0, said.AT_LOSS, waits.with_output(shape.logits)),
            self._peak(
                0.35,
                (*full, shape.in_final_norm, 0),
                (*gathered, self.own_head, prefetched),
                0,
                said.IN_NORM,
                waits.output(2),
            ),
        ]

    def _layer(self, place: StageLayer, held: Any, done: Any) -> list[PeakCandidate]:
        """Return the candidates of one layer's backward.

        Unlike without stages, layers whose backward is done stay all-gathered and their gradients unsharded.
        """
        groups, shape, waits, index = self.groups, self.shape, self.waits, place.position
        group, gone = groups.at(index), groups.before(index)
        fraction = 0.36 + 0.6 * (self.stage.num_layers - 1 - index) / self.stage.num_layers
        first_ones = self.in_layers.gradient - gone.gradient - group.gradient
        kept = (
            groups.root,
            where(waits.repeats, waits.all_gradients, first_ones),
            waits.received,
            self.adds * self.own_head,
            gone.kept,
            self.in_layers.parameters - gone.parameters - group.parameters,
        )
        before = (place.saved_before, 0, waits.sent + waits.hidden + self.back)
        coming, arriving = self._arriving(group, groups.at(index - 1))
        own = (*kept, group.parameters, 0)
        whole = where(waits.repeats, self.adds * self.compute * place.kind.weights, group.gradient)
        return [
            self._peak(
                fraction - 0.005,
                (*before, place.kind.saved, shape.stream_gradient),
                (*own, arriving),
                0,
                said.BEFORE_LAYER,
                self.stays,
            ),
            self._peak(
                fraction, (*before, held), (*own, coming, self.compute * done), 0, said.IN_LAYER, self.stays
            ),
            self._peak(
                fraction + 0.01,
                (*before, 2 * shape.stream_gradient),
                (*kept, coming, group.parameters, whole),
                0,
                said.AFTER_LAYER,
                self.stays,
            ),
        ]

    def _backward_again(self, place: StageLayer) -> PeakCandidate:
        """Return the candidate of a backward after a backward.

        One micro-batch fewer is in flight, and all layers are all-gathered.
        """
        waits, index = self.waits, place.position
        held, done = self._fullest(place, waits.adds)
        gathered = (
            self.groups.root,
            waits.all_gradients,
            waits.received,
            waits.adds * self.own_head,
            self.in_layers.parameters,
            *(0, 0, 0, 0),
            self.compute * done,
        )
        before = maximum(0, place.saved_before - self.chunk)
        return self._peak(
            0.361 + 0.6 * (self.stage.num_layers - 1 - index) / self.stage.num_layers,
            (before, 0, waits.sent - waits.ended + waits.hidden_back, held),
            gathered,
            0,
            said.IN_LAYER,
            self.stays,
        )

    def _root(self) -> list[PeakCandidate]:
        """Return the candidates at the embedding's gradient and at the casts of the first root gradients."""
        shape, groups, waits = self.shape, self.groups, self.waits
        gradients = where(waits.repeats, waits.all_gradients, self.in_layers.gradient)
        stay = waits.received + gradients + self.in_layers.parameters
        # The head's gradient was accumulated at the start of this backward.
        own = groups.root_gradient - (1 - self.adds) * groups.head
        others = self.chunk * (waits.chunks - 1)
        sent = waits.sent + waits.hidden
        held = (shape.stream_gradient, 0, groups.embedding, others + sent + self.back)
        found = [self._peak(0.97, held, (groups.root, own, 0, stay), 0, said.IN_EMBEDDING, self.stays)]
        if waits.repeats is not True:
            cast = waits.adds * (waits.all_gradients - self.in_layers.gradient)
            first_ones = self._peak(
                0.972,
                (others, sent + waits.hidden_back),
                (groups.root, groups.root_gradient + cast, stay),
                0,
                said.IN_LAST_CONVERSION,
                self.stays,
            )
            found.append(_only(1 - waits.repeats, first_ones) if waits.repeats is not False else first_ones)
        return found

    def _reductions(self) -> list[PeakCandidate]:
        """Return the candidates after the schedule: each group reshards, then reduces its gradients.

        The root comes first, then the layers in forward order; the first layer of each kind has the maximum.
        """
        groups, waits, layers = self.groups, self.waits, self.in_layers
        shards, held = self.trained > 0, (waits.hidden + waits.hidden_back,)
        root = (layers.parameters, waits.all_gradients, groups.root_reduction, waits.received)
        # With several ranks the loop variable in foreach_reduce still references the last gradient of its
        # list when the output is allocated: the only one, unless learned positions follow.
        output = shards * (groups.root_staging > 0) * (not self.learns_positions) * groups.root_shard
        found = [self._peak(0.975, held, root, output, said.REDUCING, self.stays)]
        with_experts, last = groups.first_with_experts, self.stage.num_layers - 1
        firsts: tuple[Any, ...] = (0, where(with_experts < last, with_experts, last))
        if isinstance(with_experts, int) and not 0 < with_experts <= last:
            firsts = (0,)
        for index in firsts:
            group, gone = groups.at(index), groups.before(index)
            gathered = (
                layers.parameters - gone.parameters - group.parameters,
                layers.gradient - gone.gradient,
                group.reduction,
                waits.received,
            )
            reduced = shards * (groups.root_shard + gone.shard)
            found.append(self._peak(0.976, held, gathered, reduced, said.REDUCING, self.stays))
        return found
