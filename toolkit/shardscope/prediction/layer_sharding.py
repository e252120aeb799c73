"""A decoder layer's training state on every rank in each phase of a step, and the collectives that move it.

A layer's bytes are the difference between what ``plan.memory()`` counts for its stage with and without the
layer, and those of its collectives the same difference of ``plan.step()``'s communication. Frameworks declare
which rank holds which part (``sharding.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

from shardscope.core.errors import check_integer
from shardscope.frameworks.registry import frameworks
from shardscope.memory.activations.forward import find_modules
from shardscope.memory.state.layer_sharding import (
    WHOLE,
    Interval,
    StateSharding,
    join_intervals,
    measure_intervals,
)
from shardscope.memory.state.stages import count_layer_shard
from shardscope.timing.calibration.selection import select_rates
from shardscope.timing.stages import prepare_layers

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.report import Term
    from shardscope.memory.state.training_state import TrainingState
    from shardscope.timing.report import Part
    from shardscope.timing.traffic import Collective, Transfer

StepPhase = Literal["rest", "forward", "between", "backward", "reduced", "optimizer", "updated"]
"""``between``: after the layer's forward; ``reduced``: when its gradients are reduced; ``updated``: when the
updated parameters are all-gathered."""
Kind = Literal["parameters", "gradients", "optimizer"]
KINDS: tuple[Kind, ...] = ("parameters", "gradients", "optimizer")


class Exchange(NamedTuple):
    """A collective, or a send, that moves a layer's state or its activations."""

    phase: StepPhase
    part: Part
    collective: Collective
    num_bytes: float
    """Bytes of one call for this layer: each rank's output of an all-gather, or its input to a reduction; of
    a send, the message."""
    ranks: int
    """Ranks of the group."""
    times: float
    """Calls per step."""


class RankSlices(NamedTuple):
    """Slices that one rank has of one kind of the layer's state."""

    own: tuple[Interval, ...] = ()
    """Parts that the rank keeps, as shares of the whole layer."""
    own_bytes: int = 0
    temporary: tuple[Interval, ...] = ()
    """Further parts within this phase only: all-gathered parameters, unreduced gradients."""
    temporary_bytes: int = 0


class ShardingPhase(NamedTuple):
    """One phase of a step."""

    name: StepPhase
    slices: dict[Kind, tuple[RankSlices, ...]]
    """By kind and by rank of :attr:`LayerSharding.ranks`."""
    exchanges: tuple[Exchange, ...]
    """Collectives and sends at the start of this phase."""


class RankPlace(NamedTuple):
    """Coordinates of a rank among those that hold the layer."""

    rank: int
    """Global rank."""
    tensor: int
    """Index among tensor-parallel ranks."""
    data: int
    """Index among data- and context-parallel ranks."""
    expert: int
    """Index of its part of the routed experts, among ep x etp parts."""
    replica: int
    """Index among the ranks with the same part of the routed experts."""


@dataclass(frozen=True, kw_only=True)
class LayerSharding:
    """One decoder layer's parameters, gradients and optimizer state on every rank."""

    plan: Plan
    layer: int
    stage: int
    """The pipeline stage that holds the layer."""
    has_experts: bool
    num_weights: int
    """Weights of the whole layer."""
    ranks: tuple[RankPlace, ...]
    """The ranks of that stage; all others hold nothing of the layer."""
    sharding: StateSharding
    phases: tuple[ShardingPhase, ...]
    host_bytes: int
    """Bytes of the layer's state in host memory per rank, with offloading."""
    nvme_bytes: int
    unknown: str
    """Why the collectives of parallel layers are missing; empty if they are known."""

    @cached_property
    def exchanges(self) -> tuple[Exchange, ...]:
        """All collectives of the layer in one step."""
        return tuple(exchange for phase in self.phases for exchange in phase.exchanges)

    def get_phase(self, name: StepPhase) -> ShardingPhase:
        """Return a phase by name. Raises ``KeyError`` if the plan's step has none of it."""
        return {phase.name: phase for phase in self.phases}[name]


def choose_layer(plan: Plan, layer: int | None = None) -> int:
    """Return ``layer``, or one in the middle of the model. Raises ``ValueError`` if the model lacks it."""
    number = plan.architecture.num_hidden_layers
    return number // 2 if layer is None else check_integer("layer", layer, low=0, high=number - 1)


def shard_layer(plan: Plan, layer: int | None = None) -> LayerSharding:
    """Return where the state of decoder layer ``layer`` is; by default of one in the middle of the model.

    Raises ``ValueError`` if the model has no such layer, or if the plan's memory cannot be predicted.
    """
    return _Builder(plan, choose_layer(plan, layer)).build()


class _Builder:
    """Bytes and places of one layer of one plan."""

    def __init__(self, plan: Plan, layer: int) -> None:
        self.plan, self.layer, arch = plan, layer, plan.architecture
        framework = frameworks[plan.layout.framework]
        model = framework.memory_model()
        self.has_experts = arch.is_moe_layer(layer)
        self.stage_number, position = self._find_stage(framework.sharding_model().list_chunk_layers(plan))
        shapes = model.find_shapes(plan)
        shape = shapes.kinds[shapes.kind_of[self.stage_number]]._replace(number=self.stage_number)
        # Frameworks' formulas need a layer: the one of a short stage is compared with two.
        added = 1 if shape.num_layers == 1 else 0
        compared = [
            shape._replace(
                num_layers=shape.num_layers + one,
                num_moe_layers=shape.num_moe_layers + one * self.has_experts,
            )
            for one in (added, added - 1)
        ]
        self.stages = [model.count_weights(plan, one) for one in compared]
        self.states = [model.compute_training_state(plan, stage) for stage in self.stages]
        traffic = [framework.timing_model().state_traffic(plan, stage) for stage in self.stages]
        self.traffic = [one.transfers for one in traffic]
        self.sharding = framework.sharding_model().shard_layer(
            plan, model.count_weights(plan, shape), position
        )
        whole = count_layer_shard(arch, self.has_experts, 1, 1, 1)
        self.num_weights = whole.dense + whole.experts
        self.dense_share = whole.dense / self.num_weights if self.sharding.experts else 1.0
        self.ranks = self._place_ranks()
        self.unknown = ""

    def _find_stage(self, chunk_layers: Sequence[int]) -> tuple[int, int]:
        """Return the layer's stage, and its position there with layers without experts first."""
        arch, pp, end = self.plan.architecture, self.plan.degrees.pp, 0
        on_stage: dict[int, list[int]] = {}
        for number, layers in enumerate(chunk_layers):
            on_stage.setdefault(number % pp, []).extend(range(end, end + layers))
            end += layers
        stage = next(stage for stage, layers in on_stage.items() if self.layer in layers)
        order = sorted(on_stage[stage], key=lambda index: (arch.is_moe_layer(index), index))
        return stage, order.index(self.layer)

    def _place_ranks(self) -> tuple[RankPlace, ...]:
        degrees, etp = self.plan.degrees, self.plan.layout.expert_tp
        per_stage = self.plan.world_size // degrees.pp
        return tuple(
            RankPlace(
                rank=self.stage_number * per_stage + inner,
                tensor=inner % degrees.tp,
                data=inner // degrees.tp,
                expert=inner % (etp * degrees.ep),
                replica=inner // (etp * degrees.ep),
            )
            for inner in range(per_stage)
        )

    def build(self) -> LayerSharding:
        """Return the layer's state in all phases."""
        phases = self._build_phases(self._list_exchanges())
        full, without = self.states
        return LayerSharding(
            plan=self.plan,
            layer=self.layer,
            stage=self.stage_number,
            has_experts=self.has_experts,
            num_weights=self.num_weights,
            ranks=self.ranks,
            sharding=self.sharding,
            phases=phases,
            host_bytes=full.host_bytes - without.host_bytes,
            nvme_bytes=full.nvme_bytes - without.nvme_bytes,
            unknown=self.unknown,
        )

    # ---- Collectives

    def _list_exchanges(self) -> list[Exchange]:
        """Return the layer's collectives: of its training state, then of its activations."""
        exchanges = []
        for full, without in zip(*self.traffic, strict=True):
            num_bytes = full.num_bytes - without.num_bytes
            if num_bytes and full.ranks > 1 and full.times:
                phase = self._find_phase(full)
                exchanges.append(
                    Exchange(phase, full.part, full.collective, num_bytes, full.ranks, full.times)
                )
        return exchanges + self._list_parallel_exchanges()

    def _find_phase(self, transfer: Transfer) -> StepPhase:
        if transfer.part == "gradients":
            return "reduced"
        if not self.sharding.gathers_for_passes:
            return "updated"
        return "backward" if transfer.overlaps_with == "backward" else "forward"

    def _list_parallel_exchanges(self) -> list[Exchange]:
        """Return the collectives of activations around the layer, and its stage's sends."""
        plan = self.plan
        try:
            framework = frameworks[plan.layout.framework]
            rates = select_rates(plan.cluster)
            work = prepare_layers(plan, find_modules(plan), rates, framework.timing_model())
        except ValueError as error:  # A figure of the GPU that nobody published.
            self.unknown = str(error)
            return []
        exchanges: list[Exchange] = []
        for repeated in work.parallel:
            full, without = (repeated.number(work, stage) for stage in self.stages)
            # A stage's sends are not repeated by layers.
            is_of_stage = full == without
            times = full if is_of_stage else full - without
            transfers = repeated.each.transfers
            for number, transfer in enumerate(transfers):
                # Forward has the first half of tensor parallelism's, and the first of context parallelism.
                num_first = len(transfers) // 2 if transfer.part == "tensor_parallel" else 1
                exchanges += self._split_passes(transfer, times * transfer.times, number < num_first)
        return exchanges

    def _split_passes(self, transfer: Transfer, times: float, is_first: bool) -> list[Exchange]:
        """Return a transfer of activations in forward and in backward.

        ``is_first``: whether it is forward's (``timing/parallel.py``), if it is one of tensor or context
        parallelism; all-to-alls and sends are both passes'.
        """
        whole = Exchange(
            "backward", transfer.part, transfer.collective, transfer.num_bytes, transfer.ranks, times
        )
        if transfer.part == "expert_parallel":
            in_forward = 2.0 * self.plan.num_micro_batches
        elif transfer.part == "pipeline_transfers":
            in_forward = times if transfer.overlaps_with == "forward" else 0.0
            if transfer.overlaps_with == "nothing":
                in_forward = times / 2
        else:
            in_forward = times if is_first else 0.0
        split = [whole._replace(phase="forward", times=in_forward), whole._replace(times=times - in_forward)]
        return [exchange for exchange in split if exchange.times]

    # ---- State

    def _build_phases(self, exchanges: Sequence[Exchange]) -> tuple[ShardingPhase, ...]:
        rest = self._slice_kind("parameters", self._subtract(lambda state: state.parameters))
        optimizer = self._slice_kind("optimizer", self._subtract(lambda state: state.optimizer))
        unreduced, reduced = self._slice_gradients(exchanges)
        at_rest = self._slice_gradients_at_rest(reduced)
        gathered = max(
            (exchange.num_bytes for exchange in exchanges if exchange.part == "gathers"), default=0.0
        )
        phases: list[tuple[StepPhase, Sequence[RankSlices], Sequence[RankSlices]]] = [("rest", rest, at_rest)]
        if self.sharding.gathers_for_passes:
            whole = self._add_temporary(rest, (WHOLE,) * len(rest), gathered)
            after = rest
            if self.sharding.after_forward is not None:
                kept = [self.sharding.after_forward[place.data] for place in self.ranks]
                after = self._add_temporary(rest, kept, gathered)
            phases += [("forward", whole, at_rest), ("between", after, at_rest)]
            phases.append(("backward", whole, unreduced))
        else:
            phases += [("forward", rest, at_rest), ("backward", rest, unreduced)]
        phases += [("reduced", rest, reduced), ("optimizer", rest, reduced)]
        if any(exchange.phase == "updated" for exchange in exchanges):
            phases.append(("updated", rest, at_rest))
        return tuple(
            ShardingPhase(
                name,
                {"parameters": tuple(parameters), "gradients": tuple(gradients), "optimizer": optimizer},
                tuple(exchange for exchange in exchanges if exchange.phase == name),
            )
            for name, parameters, gradients in phases
        )

    def _subtract(self, get_term: Callable[[TrainingState], Term]) -> int:
        """Return the bytes that the layer adds to a term of its stage's training state."""
        full, without = (get_term(state).num_bytes for state in self.states)
        return full - without

    def _slice_kind(self, kind: Kind, num_bytes: int) -> tuple[RankSlices, ...]:
        """Return each rank's part; ``num_bytes`` is the mean over the ranks."""
        parts = [self._find_parts(kind, place) for place in self.ranks]
        shares = [measure_intervals(one) for one in parts]
        mean = sum(shares) / len(shares)
        is_even = max(shares) - min(shares) < 1e-9
        return tuple(
            RankSlices(one, num_bytes if is_even else round(num_bytes * share / mean))
            for one, share in zip(parts, shares, strict=True)
        )

    def _find_parts(self, kind: Kind, place: RankPlace) -> tuple[Interval, ...]:
        parts = self._scale(getattr(self.sharding, kind)[place.data], place)
        experts = self.sharding.experts
        if experts is not None:
            parts += self._scale_experts(getattr(experts, kind)[place.replica], place)
        return join_intervals(parts)

    def _scale(self, parts: Sequence[Interval], place: RankPlace) -> tuple[Interval, ...]:
        """Return parts of what a tensor-parallel rank has as parts of the whole layer."""
        tp, share = self.plan.degrees.tp, self.dense_share
        return tuple(
            (share * (place.tensor + start) / tp, share * (place.tensor + end) / tp) for start, end in parts
        )

    def _scale_experts(self, parts: Sequence[Interval], place: RankPlace) -> tuple[Interval, ...]:
        number, share = self.plan.degrees.ep * self.plan.layout.expert_tp, self.dense_share
        return tuple(
            tuple(share + (1 - share) * (place.expert + at) / number for at in part)  # type: ignore[misc]
            for part in parts
        )

    def _add_temporary(
        self, slices: Sequence[RankSlices], parts: Sequence[Sequence[Interval]], num_bytes: float
    ) -> tuple[RankSlices, ...]:
        """Return ``slices`` with further ``parts`` of each rank, of which ``num_bytes`` is the whole."""
        temporary = []
        for one, place, its in zip(slices, self.ranks, parts, strict=True):
            intervals = self._scale(its, place)
            if self.sharding.experts is not None:
                intervals += self._scale_experts(its, place)
            temporary.append(
                one._replace(
                    temporary=join_intervals(intervals),
                    temporary_bytes=round(num_bytes * measure_intervals(its)),
                )
            )
        return tuple(temporary)

    def _slice_gradients(
        self, exchanges: Sequence[Exchange]
    ) -> tuple[tuple[RankSlices, ...], tuple[RankSlices, ...]]:
        """Return the gradients before and after their reduction."""
        sharding, in_state = self.sharding, self._subtract(lambda state: state.gradients)
        reduced = self._slice_kind("gradients", in_state)
        whole = (WHOLE,) * len(reduced)
        if sharding.gradient_bytes is not None:
            reduced = tuple(
                slices._replace(own_bytes=self._find_gradient_bytes(place))
                for slices, place in zip(reduced, self.ranks, strict=True)
            )
        if sharding.buffers_gradients:
            unreduced = self._add_temporary(tuple(RankSlices() for _ in reduced), whole, in_state)
            if sharding.keeps_whole_buffer:
                # The buffer's bytes stay; what was reduced is this rank's part of it.
                reduced = tuple(slices._replace(own_bytes=in_state) for slices in reduced)
                reduced = self._add_temporary(reduced, whole, 0)
            return unreduced, reduced
        # DeepSpeed all-reduces the gradients of stage 2. Replicas all-reduce the shards of a reduce-scatter.
        by_collective = {
            collective: sum(
                one.num_bytes for one in exchanges if one.collective == collective and one.part == "gradients"
            )
            for collective in ("reduce_scatter", "all_reduce")
        }
        sent = by_collective["reduce_scatter"] or by_collective["all_reduce"]
        # Reduced gradients of earlier micro-batches stay.
        accumulates = any(one.part == "gradients" and one.times > 1 for one in exchanges)
        earlier = reduced if accumulates else tuple(RankSlices() for _ in reduced)
        return self._add_temporary(earlier, whole, sent), reduced

    def _find_gradient_bytes(self, place: RankPlace) -> int:
        """Return the bytes of the whole tensors whose gradients a rank keeps."""
        num_bytes = 0
        if self.sharding.gradient_bytes is not None:
            num_bytes += self.sharding.gradient_bytes[place.data]
        experts = self.sharding.experts
        if experts is not None and experts.gradient_bytes is not None:
            num_bytes += experts.gradient_bytes[place.replica]
        return num_bytes

    def _slice_gradients_at_rest(self, reduced: Sequence[RankSlices]) -> tuple[RankSlices, ...]:
        state = self.states[0]
        if state.gradients_rest is None and not state.keeps_gradients:
            return tuple(RankSlices() for _ in reduced)
        # A buffer that is never freed, whose content is of no use between steps.
        empty = tuple(RankSlices(own_bytes=slices.own_bytes) for slices in reduced)
        parts = [slices.temporary or slices.own for slices in reduced]
        return tuple(slices._replace(temporary=part) for slices, part in zip(empty, parts, strict=True))
