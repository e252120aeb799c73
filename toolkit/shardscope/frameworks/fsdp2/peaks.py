"""The instants of an FSDP2 step: which groups are gathered, and which gradients wait, layer by layer.

Read off ``FSDPParamGroup`` (torch 2.13): forward frees an all-gather's output only after the next one is
copied out; backward gathers the layer before while it computes one; a reduce-scatter's input is held until
the next reduction, and whole gradients until they are copied into it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardscope.frameworks.fsdp2.pipelined import NOTHING_WAITS, Waiting
from shardscope.memory.arithmetic import largest, where
from shardscope.memory.backward import Backward, Peak, PeakWords
from shardscope.memory.precision import widths
from shardscope.memory.report import Term
from shardscope.memory.words import gib

if TYPE_CHECKING:
    from shardscope.frameworks.fsdp2.groups import Groups
    from shardscope.memory.order import Place
    from shardscope.memory.stages import Stage
    from shardscope.plan import Plan


def _says(held: str, gathered: str, gradients: str = "of the layers that are reduced by then") -> PeakWords:
    return PeakWords(
        f"{held}, operator by operator",
        f"{gathered} (torch.distributed.fsdp, fully_shard)",
        f"shards {gradients}",
    )


def _used_up() -> str:
    return "all are used up"


_BEFORE_FORWARD = _says(
    "saved by the layers before",
    "root group, a layer's parameters, its all-gather output and the one before",
)
_IN_FORWARD = _says(
    "saved, and in use inside one layer", "root group, a layer's parameters and its all-gather output"
)
_FIRST = _says(
    "what the embedding puts out", "root group, the first layer's parameters, and both all-gather outputs"
)
_AT_LOSS = _says("all that forward saved", "root group, next layer's all-gather")
_IN_NORM = _says(
    "all that forward saved, and the final norm's gradients",
    "root group, its head's gradient, next all-gather",
)
_BEFORE_LAYER = _says("saved by the layers left", "root group, a layer's parameters and all-gather output")
_IN_LAYER = _says("saved, and gradients inside one layer", "root group, layers in use, first gradients")
_AFTER_LAYER = _says(
    "saved by the layers left",
    "root group, one layer's gradients, their reduce-scatter's input and output",
)
_IN_EMBEDDING = _says(
    "the embedding's gradient, and a tied head's",
    "root group, its gradients, last layer's reduce-scatter",
)
_IN_ROOT = _says("", "root gradients, and their reduce-scatter")._replace(activations=_used_up)
_AFTER_ROOT = _says("", "the root's reduce-scatter input", "of all")._replace(activations=_used_up)


def gathered_at_loss(plan: Plan, stage: Stage, groups: Groups, waits: Waiting) -> Term:
    """At the loss: the root group, what forward left, and the last all-gather's output."""
    last = stage.num_layers - 1
    # A pipeline's loss is computed outside of the root module, which has given up its staging by then.
    staging = (plan.degrees.pp == 1) * groups.at(last).staging
    kept = groups.before(stage.num_layers).kept
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


def peaks(
    plan: Plan, stage: Stage, shape: Backward, groups: Groups, waits: Waiting, trained: Any
) -> list[Peak]:
    """Layers in forward, the loss, the final norm, layers in backward, the embedding, the root's turn."""
    return _Step(plan, stage, shape, groups, waits, trained).peaks()


class _Step:
    """One micro-batch on one rank, the last of the step."""

    def __init__(
        self, plan: Plan, stage: Stage, shape: Backward, groups: Groups, waits: Waiting, trained: Any
    ) -> None:
        self.stage, self.shape, self.groups, self.trained = stage, shape, groups, trained
        self.waits = waits = waits if waits is NOTHING_WAITS else waits.at_fullest(shape.layers)
        self.reduces: Any = plan.degrees.pp == 1
        """Whether a micro-batch's gradients are reduced, and its layers given up, in its own backward."""
        layout: Any = plan.layout
        self.whole = layout.reshard_after_forward is False
        """Whether gathered layers stay until they have gone backward."""
        self.accumulates = plan.num_micro_batches > 1
        self.compute = widths[plan.recipe.precision].compute
        # A tied head's gradient waits inside of autograd for the embedding's, no parameter's yet.
        tied = plan.architecture.tie_word_embeddings
        self.held_head = self.reduces * groups.head if tied else 0
        # Where embedding and head are on two stages, both have a weight of their own.
        own_head = (1 - self.reduces) * groups.head if tied else groups.head
        self.root = groups.root + waits.gathered + waits.adds * own_head
        self.making_head = groups.root + waits.gathered + own_head
        self.in_layers = groups.before(stage.num_layers)
        self.none = self._gradients(self.in_layers.shard)

    def peaks(self) -> list[Peak]:
        shape, groups = self.shape, self.groups
        order = shape.find_order()
        found: list[Peak] = []
        for place in order.last_places(shape.layers):
            found += self._forward(place)
        fullest: dict[int, tuple[Any, Any]] = {}
        for place in order.places(shape.layers, self._growth):
            kind = id(place.kind)
            if kind not in fullest:
                fullest[kind] = self._fullest(place)
            found += self._layer(place, *fullest[kind])
        full = shape.layers + shape.edges + shape.cast + self.waits.output
        prefetched = 0 if self.whole else groups.at(self.stage.num_layers - 1).staging
        around = prefetched + self.in_layers.kept + groups.left_over
        at_loss = self.reduces * prefetched + self.in_layers.kept + groups.left_over + self.waits.gathered
        return [
            *found,
            self._first(),
            Peak(
                0.34,
                full,
                groups.root + at_loss,
                self.none,
                _AT_LOSS,
                self.waits.with_output(shape.logits),
            ),
            Peak(
                0.35,
                full + shape.norm + self.held_head,
                self.making_head + around,
                self.none,
                _IN_NORM,
                self.waits.own_logits(),
            ),
            *self._root(),
        ]

    def _growth(self, moe: bool) -> Any:
        """Bytes that come with each layer that has gone backward, less those that go."""
        group = self.groups.experts if moe else self.groups.dense
        reduced = where(self.accumulates, 0, group.shard)
        return where(self.reduces, reduced, group.parameters) - group.kept

    def _gradients(self, before: Any) -> Any:
        """Shards of the layers that are reduced; ``before`` are the bytes of those before them."""
        done = (self.trained > 0) * (self.in_layers.shard - before)
        return self.reduces * where(self.accumulates, self.trained, done)

    def _forward(self, place: Place) -> list[Peak]:
        """While a layer is gathered in forward, and while it computes."""
        groups, index = self.groups, place.index
        group, before_it = groups.at(index), groups.at(index - 1)
        fraction = 0.02 + 0.3 * (index + 1) / self.stage.num_layers
        gathered = groups.root + groups.before(index).kept + groups.left_over + self.waits.gathered
        gathered = gathered + group.parameters + group.staging
        before = place.before + self.waits.output
        previous = where(index > 0, before_it.staging, groups.root_staging)
        alone = (group.staging == 0) * group.copying
        return [
            Peak(
                fraction - 0.01,
                before,
                gathered + previous + alone,
                self.none,
                _BEFORE_FORWARD,
                None,
                "forward",
            ),
            Peak(
                fraction,
                before + place.kind.forward,
                gathered,
                self.none,
                _IN_FORWARD,
                None,
                "forward",
            ),
        ]

    def _first(self) -> Peak:
        """The first layer is gathered while the root's all-gather output, often the largest, still waits."""
        groups, first = self.groups, self.groups.at(0)
        gathered = groups.root + groups.root_staging + groups.left_over + first.parameters + first.staging
        return Peak(0.02, self.shape.stream, gathered, self.none, _FIRST, None, "forward")

    def _layer(self, place: Place, held: Any, done: Any) -> list[Peak]:
        """Before a layer, at the fullest of its instants, and after it, with its gradients whole.

        ``held`` and ``done`` are those of :meth:`_fullest`.
        """
        groups, shape, index = self.groups, self.shape, place.index
        layers = self.stage.num_layers
        group, next_one, last_one = groups.at(index), groups.at(index - 1), groups.at(index + 1)
        fraction = 0.36 + 0.6 * (layers - 1 - index) / layers
        before, gone = place.before + self.held_head + self.waits.output, groups.before(index)
        # What is not reduced stays gathered as well.
        done_ones = self.in_layers.parameters - gone.parameters - group.parameters
        kept = self.root + gone.kept + (1 - self.reduces) * done_ones
        reducing = self.reduces * where(index + 1 < layers, last_one.reduction, groups.left_over)
        own = kept + group.parameters + reducing
        coming: Any = 0
        arriving = own
        if not self.whole:
            coming = next_one.staging
            # A gather's input is there before its output is; parameters are copied out of that.
            arriving = largest(
                own + group.kept + group.staging + (group.staging == 0) * group.copying,
                own + coming + (coming > 0) * next_one.copying,
            )
        gradient = self.waits.adds * self.compute * place.kind.weights
        # Whole gradients beside their reduce-scatter's input; or that beside its output, which they become.
        is_reduced = self.reduces * where(group.shard > gradient, 1, 0)
        copied = where(self.reduces, group.reduction, group.parameters)
        output = where(self.accumulates, group.shard, 0)
        not_yet = self._gradients(gone.shard + group.shard)
        return [
            Peak(
                fraction - 0.005,
                before + place.kind.saved + shape.stream,
                arriving,
                not_yet,
                _BEFORE_LAYER,
            ),
            Peak(fraction, before + held, own + coming + self.compute * done, not_yet, _IN_LAYER),
            Peak(
                fraction + 0.01,
                before + 2 * shape.stream,
                kept + coming + copied + where(is_reduced > 0, output, gradient),
                self._gradients(gone.shard + (1 - is_reduced) * group.shard),
                _AFTER_LAYER,
            ),
        ]

    def _fullest(self, place: Place) -> tuple[Any, Any]:
        """(bytes held, weights with gradients) at the instant of a layer that has most of both together.

        Gradients that are added to those of micro-batches before are there only while they are made.
        """
        compute, adds = self.compute, self.waits.adds
        held: Any = 0
        done: Any = 0
        for one in place.kind.backward:
            made = where(adds, one.done, one.making + one.experts)
            more = one.held + compute * made > held + compute * done
            held, done = where(more, one.held, held), where(more, made, done)
        return held, done

    def _root(self) -> list[Peak]:
        """The embedding's gradient, and the root group's reduction."""
        shape, groups = self.shape, self.groups
        in_all = self._gradients(0)
        embedding = shape.stream + 2 * self.held_head + groups.embedding + self.waits.beside(shape.layers)
        stay = self.waits.received + self.waits.all_gradients + (1 - self.reduces) * self.in_layers.parameters
        largest_layer = largest(groups.dense.reduction, groups.experts.reduction)
        reduced = groups.root_reduction + where(self.accumulates, groups.root_shard, 0)
        left = groups.at(self.stage.num_layers - 1).reduction + self.waits.received
        return [
            Peak(
                0.97,
                embedding,
                groups.root
                + self.waits.adds * groups.root_gradient
                + self.reduces * groups.at(0).reduction
                + stay,
                in_all,
                _IN_EMBEDDING,
            ),
            Peak(
                0.975,
                0,
                where(
                    self.reduces,
                    groups.root_gradient + groups.root_reduction,
                    groups.root
                    + stay
                    + (groups.root_staging > 0) * largest(groups.root_reduction, largest_layer),
                ),
                in_all,
                _IN_ROOT,
            ),
            Peak(0.978, 0, where(self.reduces, reduced, left), self.trained, _AFTER_ROOT),
        ]
