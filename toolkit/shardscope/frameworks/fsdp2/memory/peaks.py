"""Peak candidates of an FSDP2 step: all-gathered groups and unreduced gradients, layer by layer.

Source: ``FSDPParamGroup`` (torch 2.13). Forward frees an all-gather's output only after the next one is
copied out. Backward prefetches the previous layer while it computes one. A reduce-scatter's input is alive
until the next reduce-scatter, and unsharded gradients until they are copied into that input.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardscope.core.number_format import gib
from shardscope.core.ops import maximum, pick_largest_row, where
from shardscope.core.precision import widths
from shardscope.frameworks.fsdp2.memory import words as said
from shardscope.memory.activations.stage_activations import StageBackward
from shardscope.memory.report import Term, sum_parts
from shardscope.memory.state.training_state import PeakCandidate, PeakTerms

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.frameworks.fsdp2.memory.groups import GroupBuffers, StageGroups
    from shardscope.frameworks.fsdp2.memory.pipeline import Waiting
    from shardscope.memory.activations.stage_activations import StageLayer
    from shardscope.memory.report import Phase
    from shardscope.memory.state.stages import Stage


def compute_gathered_at_loss(plan: Plan, stage: Stage, groups: StageGroups, waits: Waiting) -> Term:
    """Return the all-gather buffers at the loss.

    They are the root group, the layers that stay all-gathered after forward and the last all-gather's output.
    """
    last = stage.num_layers - 1
    # A pipeline computes the loss outside the root module, which has freed its staging buffer by then.
    staging = (plan.degrees.pp == 1) * groups.at(last).staging
    kept = groups.kept_before(stage.num_layers)
    reshard = getattr(plan.layout, "reshard_after_forward", True)

    def words() -> str:
        parts = [
            f"{gib(groups.root)} GiB root group (embedding, final norm, head)",
            f"{gib(staging)} GiB last all-gather",
        ]
        if kept:
            parts.append(f"{gib(kept)} GiB layers kept after forward (reshard_after_forward={reshard})")
        if groups.left_over:
            parts.append(f"{gib(groups.left_over)} GiB reduce-scatter input of the micro-batch before")
        return " + ".join(parts) + waits.words()

    return Term(groups.root + staging + kept + groups.left_over + waits.gathered, words)


class Step:
    """Peak candidates of the step's last micro-batch on one rank."""

    def __init__(
        self,
        plan: Plan,
        stage: Stage,
        shape: StageBackward,
        groups: StageGroups,
        waits: Waiting,
        trained: Any,
    ) -> None:
        self.stage, self.shape, self.groups, self.trained = stage, shape, groups, trained
        self.waits = waits
        layout: Any = plan.layout
        self.whole = layout.reshard_after_forward is False
        """Whether layers stay all-gathered until their backward is done."""
        self.accumulates = plan.num_micro_batches > 1
        self.outputs = self.accumulates | (trained == 0)
        """Whether a reduce-scatter's output is allocated besides the gradients: it is added to them, or moved
        to the host."""
        width = widths[plan.recipe.precision]
        self.compute, self.original = width.compute, width.original
        # Autograd holds a tied head's gradient until the embedding's exists: it is not yet in ``.grad``.
        tied = plan.architecture.tie_word_embeddings
        self.held_head = groups.head if tied else 0
        self.own_head = 0 if tied else groups.head
        self.waiting = (groups.root, waits.gradients, waits.received)
        self.in_forward = (groups.root, 0, waits.received)
        self.in_layers = groups.before(stage.num_layers)
        self.none = self._gradients(self.in_layers.shard)

    def peaks(self) -> list[PeakCandidate]:
        shape = self.shape
        order = shape.find_layer_order()
        found: list[PeakCandidate] = []
        for place in order.find_last_layers(shape.saved_by_layers):
            found += self._forward(place)
        fullest: dict[int, tuple[Any, Any]] = {}
        for place in order.find_peak_layers(shape.saved_by_layers, self._growth):
            kind = id(place.kind)
            if kind not in fullest:
                fullest[kind] = self._fullest(place)
            found += self._layer(place, *fullest[kind])
        return [*found, self._first(), *self._loss_and_norm(), *self._root()]

    def _loss_and_norm(self) -> list[PeakCandidate]:
        """Return the candidates in the backward of the loss and of the final norm."""
        shape, groups = self.shape, self.groups
        full = (shape.saved_by_layers, shape.saved_by_head, shape.weight_casts, 0)
        gathered = (groups.root, 0, 0, self.in_layers.kept, groups.left_over)
        prefetched = 0 if self.whole else groups.at(self.stage.num_layers - 1).staging
        norm = (*full, shape.in_final_norm, self.held_head)
        coming = (self.own_head, prefetched)
        return [
            self._peak(0.34, full, (*gathered, prefetched), self.none, said.AT_LOSS, shape.logits),
            self._peak(0.35, norm, (*gathered, *coming), self.none, said.IN_NORM),
        ]

    def _growth(self, moe: bool) -> Any:
        """Return the bytes allocated minus the bytes freed by each layer whose backward is done."""
        group = self.groups.experts if moe else self.groups.dense
        return where(self.accumulates, 0, group.shard) - group.kept

    def _gradients(self, before: Any) -> Any:
        """Return the gradient shards that are reduced so far. Bytes.

        ``before`` is the size of the gradient shards of the layers that are not reduced yet.
        """
        done = (self.trained > 0) * (self.in_layers.shard - before)
        return where(self.accumulates, self.trained, done)

    def _forward(self, place: StageLayer) -> list[PeakCandidate]:
        """Return the candidates of one layer's forward: during its all-gather and during its compute."""
        groups, index = self.groups, place.position
        group, before_it = groups.at(index), groups.at(index - 1)
        fraction = 0.02 + 0.3 * (index + 1) / self.stage.num_layers
        gathered = (
            *self.in_forward,
            groups.kept_before(index),
            groups.left_over,
            group.parameters,
            group.staging,
        )
        before = (place.saved_before, self.waits.sent)
        previous = where(index > 0, before_it.staging, groups.root_staging)
        alone = (group.staging == 0) * group.copying
        return [
            self._peak(
                fraction - 0.01,
                before,
                (*gathered, previous, alone),
                self.none,
                said.BEFORE_FORWARD,
                None,
                "forward",
            ),
            self._peak(
                fraction,
                (*before, place.kind.forward),
                gathered,
                self.none,
                said.IN_FORWARD,
                None,
                "forward",
            ),
        ]

    def _first(self) -> PeakCandidate:
        """Return the candidate at the first layer's all-gather, where the root's output is not freed yet."""
        groups, first = self.groups, self.groups.at(0)
        gathered = (
            groups.root,
            groups.root_staging,
            self.waits.received,
            groups.left_over,
            first.parameters,
            first.staging,
        )
        return self._peak(
            0.02, (self.shape.stream_gradient,), gathered, self.none, said.FIRST, None, "forward"
        )

    def _layer(self, place: StageLayer, held: Any, done: Any) -> list[PeakCandidate]:
        """Return the candidates of one layer's backward.

        They are before it starts, at its own maximum, and after it with its gradients unsharded. ``held`` and
        ``done`` are the result of :meth:`_fullest`.
        """
        groups, shape, index = self.groups, self.shape, place.position
        layers = self.stage.num_layers
        group, next_one, last_one = groups.at(index), groups.at(index - 1), groups.at(index + 1)
        fraction = 0.36 + 0.6 * (layers - 1 - index) / layers
        before, shards = (place.saved_before, self.held_head, 0), groups.shards_before(index)
        kept = (groups.root, 0, 0, self.own_head, groups.kept_before(index), 0)
        reducing = where(index + 1 < layers, last_one.reduction, groups.left_over)
        own = (*kept, group.parameters, reducing)
        coming, arriving = self._arriving(group, next_one)
        gradient = self.compute * place.kind.weights
        # Either the unsharded gradients and the reduce-scatter's input are alive, or its input and output.
        is_reduced = where(group.shard > gradient, 1, 0)
        output = self.outputs * group.shard
        not_yet = self._gradients(shards + group.shard)
        return [
            self._peak(
                fraction - 0.005,
                (*before, place.kind.saved, shape.stream_gradient),
                (*own, arriving),
                not_yet,
                said.BEFORE_LAYER,
            ),
            self._peak(
                fraction, (*before, held), (*own, coming, self.compute * done), not_yet, said.IN_LAYER
            ),
            self._peak(
                fraction + 0.01,
                (*before, 2 * shape.stream_gradient),
                (*kept, coming, group.reduction, where(is_reduced > 0, output, gradient)),
                self._gradients(shards + (1 - is_reduced) * group.shard),
                said.AFTER_LAYER,
            ),
        ]

    def _arriving(self, group: GroupBuffers, next_one: GroupBuffers) -> tuple[Any, Any]:
        """Return the buffers of pending all-gathers in backward: during a layer's compute, and before it."""
        if self.whole:
            return 0, 0
        coming = next_one.staging
        # The all-gather's input is allocated before its output; the parameters are copied out of the output.
        arriving = maximum(
            group.kept + group.staging + (group.staging == 0) * group.copying,
            coming + (coming > 0) * next_one.copying,
        )
        return coming, arriving

    def _fullest(self, place: StageLayer, adds: Any = True) -> tuple[Any, Any]:
        """Return (activation bytes, weights with new gradients) at the maximum of both in a layer's backward.

        Without ``adds`` only gradients being computed count: finished ones were added to the gradients of
        earlier micro-batches.
        """
        compute, rows = self.compute, []
        for one in place.kind.backward:
            made = (
                one.weights_with_gradient
                if adds is True
                else where(adds, one.weights_with_gradient, one.current_matrix + one.current_experts)
            )
            rows.append((one.activations + compute * made, one.activations, made))
        _, held, done = pick_largest_row(rows)
        return held, done

    def _root(self) -> list[PeakCandidate]:
        """Return the candidates at the embedding's gradient and at the root group's reduce-scatter."""
        shape, groups = self.shape, self.groups
        in_all = self._gradients(0)
        held = (shape.stream_gradient, 2 * self.held_head, groups.embedding, 0)
        reduced = groups.root_reduction + self.outputs * groups.root_shard
        staged = groups.at(0).reduction
        # The loop variable in foreach_reduce still references the last gradient of its list.
        last = (groups.root_staging > 0) * self.own_head
        in_root = groups.root_gradient + groups.root_reduction
        return [
            self._peak(0.97, held, (groups.root, groups.root_gradient, staged, 0), in_all, said.IN_EMBEDDING),
            self._peak(0.975, (0,), (in_root,), in_all, said.IN_ROOT),
            self._peak(0.978, (0,), (reduced, last), self.trained, said.AFTER_ROOT),
        ]

    def _peak(
        self,
        fraction: float,
        held: tuple[Any, ...],
        gathered: tuple[Any, ...],
        gradients: Any,
        words: said.Words,
        logits: Term | None = None,
        phase: Phase = "backward",
    ) -> PeakCandidate:
        """Return a peak candidate from its components in bytes, in the order of ``words``."""
        return PeakCandidate(
            fraction,
            sum(held),
            sum(gathered),
            gradients,
            lambda: self._terms(held, gathered, gradients, words),
            logits,
            phase,
        )

    def _terms(
        self, held: tuple[int, ...], gathered: tuple[int, ...], gradients: int, words: said.Words
    ) -> PeakTerms:
        def reduced() -> str:
            if not gradients:
                return "none is reduced yet"
            numbers = f"{gradients // self.original:,} gradients of this rank × {self.original} bytes"
            return f"{numbers}, reduce-scattered by then"

        source = self.shape.explain_layers if words.explains_layers else None
        return PeakTerms(
            sum_parts(*zip(held, words.held, strict=True), source=source),
            sum_parts(*zip(gathered, words.gathered, strict=True), source=lambda: said.SOURCE),
            Term(gradients, reduced),
        )
