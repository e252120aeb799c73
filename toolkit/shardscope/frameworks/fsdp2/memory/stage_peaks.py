"""The instants of an FSDP2 step in a pipeline stage, beside those of ``peaks.py``.

Read off ``torch.distributed.pipelining`` (torch 2.13): ``backward_maybe_with_nosync`` neither reduces
gradients nor gives up a layer, the forward after it gives layers up one by one, and ``perform_reduce_grad``
reduces every group when the schedule has ended, the root first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardscope.core.arrays.arithmetic import is_array, largest, where
from shardscope.frameworks.fsdp2.memory import words as said
from shardscope.frameworks.fsdp2.memory.peaks import Step
from shardscope.frameworks.fsdp2.memory.pipeline import NOTHING_WAITS, Waiting
from shardscope.memory.activations.backward import Peak
from shardscope.memory.report import Term

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardscope.core.plan import Plan
    from shardscope.frameworks.fsdp2.memory.groups import Groups
    from shardscope.memory.activations.backward import Backward
    from shardscope.memory.layer_order import Place
    from shardscope.memory.state.stages import Stage


def peaks(
    plan: Plan, stage: Stage, shape: Backward, groups: Groups, waits: Waiting, trained: Any
) -> list[Peak]:
    """Layers in forward, the loss, the final norm, layers in backward, the embedding, the reductions."""
    if waits is NOTHING_WAITS:
        return Step(plan, stage, shape, groups, waits, trained).peaks()
    return StagedStep(plan, stage, shape, groups, waits, trained).peaks()


def _only(here: Any, peak: Peak) -> Peak:
    """``peak``, with nothing in it in other rows of an array."""
    logits = peak.logits
    return Peak(
        peak.fraction,
        here * peak.activations,
        here * peak.gather,
        here * peak.gradients,
        peak.find_terms,
        None if logits is None else Term(here * logits[0], logits.explain),
        peak.phase,
    )


class StagedStep(Step):
    """One stage on one rank: micro-batches in flight, and gradients that wait for the schedule's end."""

    def __init__(
        self, plan: Plan, stage: Stage, shape: Backward, groups: Groups, waits: Waiting, trained: Any
    ) -> None:
        super().__init__(plan, stage, shape, groups, waits, trained)
        # Where embedding and head are on two stages, both have a weight of their own.
        self.held_head, self.own_head = 0, groups.head
        self.adds = where(waits.repeats, waits.adds, True)
        """Whether new gradients come beside those there are: the first ones always do."""
        self.learns_positions = plan.architecture.position_embedding == "learned"
        self.chunk = shape.layers // waits.chunks
        """What the layers of one micro-batch saved."""
        self.back = waits.repeats * waits.hidden_back
        self.stays = waits.output(1)

    def peaks(self) -> list[Peak]:
        waits = self.waits
        order = self.shape.find_order()
        found = [self._first(), *self._loss_and_norm(), *self._root(), *self._reductions()]
        for place in order.last_places(self.shape.layers):
            found += self._forward(place)
            found += self._where(waits.repeats, self._forward_again, place)
            # Before the last layers most is held, and as much is gathered as before any other.
            found += self._where(waits.chunks > 1, self._backward_again, place)
        fullest: dict[int, tuple[Any, Any]] = {}
        for place in order.places(self.shape.layers, self._growth):
            kind = id(place.kind)
            is_other_end = kind in fullest and place.index == place.kind.lowest
            if kind not in fullest:
                fullest[kind] = self._fullest(place, self.adds)
            # Of arrays each place has a kind of its own.
            if is_array(place.kind.num_layers) or is_array(place.index) or is_other_end:
                # The other end of a kind, where most of its layers are gathered.
                found += self._where(waits.repeats, self._forward_again, place)
            found += self._layer(place, *fullest[kind])
        return found

    def _where(self, there: Any, find: Callable[[Place], Peak], place: Place) -> list[Peak]:
        """An instant, if there is one; of an array of plans with nothing in it in the others."""
        if is_array(there):
            return [_only(there, find(place))]
        return [find(place)] if there else []

    def _growth(self, moe: bool) -> Any:
        group = self.groups.experts if moe else self.groups.dense
        return group.parameters + where(self.waits.repeats, 0, group.gradient) - group.kept

    def _gradients(self, before: Any) -> Any:
        """None is reduced before the schedule has ended."""
        return 0 * before

    def _forward_again(self, place: Place) -> Peak:
        """A forward after a backward, which has left this layer and all behind it gathered."""
        groups, waits, index = self.groups, self.waits, place.index
        group, gone = groups.at(index), groups.before(index)
        later = self.in_layers.parameters - gone.parameters - group.parameters
        held = (place.before, waits.sent + self.back, place.kind.forward)
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

    def _loss_and_norm(self) -> list[Peak]:
        shape, waits = self.shape, self.waits
        full = (shape.layers, shape.edges, shape.cast, waits.sent + waits.hidden + self.back)
        gathered = (*self.waiting, self.in_layers.kept, 0)
        prefetched = 0 if self.whole else self.groups.at(self.stage.num_layers - 1).staging
        # A pipeline's loss is computed outside of the root module, which gathers nothing for it.
        return [
            self._peak(0.34, full, (*gathered, 0), 0, said.AT_LOSS, waits.with_output(shape.logits)),
            self._peak(
                0.35,
                (*full, shape.norm, 0),
                (*gathered, self.own_head, prefetched),
                0,
                said.IN_NORM,
                waits.output(2),
            ),
        ]

    def _layer(self, place: Place, held: Any, done: Any) -> list[Peak]:
        """As without stages; but layers that are done stay gathered, and their gradients whole."""
        groups, shape, waits, index = self.groups, self.shape, self.waits, place.index
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
        before = (place.before, 0, waits.sent + waits.hidden + self.back)
        coming, arriving = self._arriving(group, groups.at(index - 1))
        own = (*kept, group.parameters, 0)
        whole = where(waits.repeats, self.adds * self.compute * place.kind.weights, group.gradient)
        return [
            self._peak(
                fraction - 0.005,
                (*before, place.kind.saved, shape.stream),
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
                (*before, 2 * shape.stream),
                (*kept, coming, group.parameters, whole),
                0,
                said.AFTER_LAYER,
                self.stays,
            ),
        ]

    def _backward_again(self, place: Place) -> Peak:
        """A backward after a backward: a micro-batch less is in flight, and all layers are gathered."""
        waits, index = self.waits, place.index
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
        before = largest(0, place.before - self.chunk)
        return self._peak(
            0.361 + 0.6 * (self.stage.num_layers - 1 - index) / self.stage.num_layers,
            (before, 0, waits.sent - waits.ended + waits.hidden_back, held),
            gathered,
            0,
            said.IN_LAYER,
            self.stays,
        )

    def _root(self) -> list[Peak]:
        """The embedding's gradient, and the casts of the root's first ones."""
        shape, groups, waits = self.shape, self.groups, self.waits
        gradients = where(waits.repeats, waits.all_gradients, self.in_layers.gradient)
        stay = waits.received + gradients + self.in_layers.parameters
        # The head's gradient is added long before.
        own = groups.root_gradient - (1 - self.adds) * groups.head
        others = self.chunk * (waits.chunks - 1)
        sent = waits.sent + waits.hidden
        held = (shape.stream, 0, groups.embedding, others + sent + self.back)
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

    def _reductions(self) -> list[Peak]:
        """When the schedule has ended: each group gives up its parameters, and then reduces its gradients.

        The root comes first, then layers in the order of forward; of a kind the first is fullest.
        """
        groups, waits, layers = self.groups, self.waits, self.in_layers
        shards, held = self.trained > 0, (waits.hidden + waits.hidden_back,)
        root = (layers.parameters, waits.all_gradients, groups.root_reduction, waits.received)
        # Of several ranks foreach_reduce's loop variable still has the last gradient of its list when the
        # output is made: all of the list, where no learned positions follow.
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
