"""FSDP2's training state: every tensor cut along its first dimension, gathered one decoder layer at a time.

Read off ``torch.distributed.fsdp`` (``_fully_shard/_fsdp_param.py``, ``_fsdp_collectives.py``): sharded
originals stay in their own type, groups are gathered in the compute type, gradients are reduce-scattered in
the reduction type, and while one layer computes the next is already on its way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from shardscope.frameworks.fsdp2.limits import HOST_BUILD_BYTES
from shardscope.memory.arithmetic import ceil_div, largest, looked_up, smallest, where
from shardscope.memory.backward import Backward, Peak, places
from shardscope.memory.optimizer_state import optimizer_bytes
from shardscope.memory.precision import FP32, widths
from shardscope.memory.report import Term, no_bytes
from shardscope.memory.stages import (
    Shapes,
    Stage,
    StageShape,
    layer_shard,
    layers_by_kind,
    outer_shapes,
    shapes_of,
    stage_of,
)
from shardscope.memory.state import TrainingState
from shardscope.memory.words import count, gib

if TYPE_CHECKING:
    from shardscope.frameworks.fsdp2.layout import Fsdp2Layout
    from shardscope.plan import Plan


def shapes(plan: Plan) -> Shapes:
    """Stages of ``torch.distributed.pipelining``, or the one of the whole model."""
    return shapes_of(plan.architecture, plan.stage_layers)


def stage(plan: Plan, shape: StageShape) -> Stage:
    """The weights of one of them."""
    return stage_of(plan, shape)


def training_state(plan: Plan, stage: Stage) -> TrainingState:
    """Sharded originals, gradients and moments; gathered layers and reductions as staging."""
    layout: Any = plan.layout
    degrees, recipe = plan.degrees, plan.recipe
    width = widths[recipe.precision]
    ranks = degrees.shard * degrees.cp
    optimizer = optimizer_bytes(plan, stage, width.original, ranks, library="torchao")
    trained = width.original * stage.trainable_shard
    parameters = width.original * stage.shard + (trained if recipe.has_adapters else 0)
    # On CPU ranks the host's memory is the rank's own, and offloading moves nothing.
    on_host = layout.offload == "cpu" and plan.on_gpu

    def parameter_words() -> str:
        if recipe.has_adapters:
            return (
                f"({stage.base:,} frozen + {stage.adapters:,} of adapters) × {width.original} bytes / "
                f"{ranks} ranks, each tensor's rows rounded up (fully_shard keeps the sharded originals)"
            )
        return (
            f"{stage.base:,} parameters × {width.original} bytes / {ranks} ranks, each tensor's rows rounded "
            "up (fully_shard keeps the sharded originals)"
        )

    groups = _groups(plan, stage)
    away = no_bytes("in host memory (CPUOffloadPolicy)")
    return TrainingState(
        parameters=away if on_host else Term(parameters, parameter_words),
        gradients=away
        if on_host
        else Term(
            trained,
            lambda: (
                f"{stage.trainable:,} gradients × {width.original} bytes / {ranks} ranks, reduce-scattered"
            ),
        ),
        optimizer=away if on_host else optimizer.state,
        optimizer_working=away if on_host else optimizer.working,
        gather_forward=_gathered_forward(layout, groups),
        initialisation={} if on_host else {"parameters": _initialising(plan, stage, parameters)},
        find_backward=lambda shape: _backward(plan, stage, shape, groups, 0 if on_host else trained),
        group_sizes=(ranks, degrees.replicate, degrees.tp, degrees.pp),
        host_bytes=parameters + trained + optimizer.state.num_bytes if on_host else 0,
    )


def _initialising(plan: Plan, stage: Stage, shards: int) -> Term:
    """Weights drawn one whole tensor at a time; small models come from the host, one group at a time."""
    width = widths[plan.recipe.precision].original
    if FP32 * plan.architecture.num_parameters > HOST_BUILD_BYTES:
        shapes = outer_shapes(plan, stage.is_first, stage.is_last)
        whole = width * largest(0, *(rows * columns for _, rows, columns in shapes))
        return Term(
            shards + whole,
            lambda: f"{gib(shards)} GiB shards + {gib(whole)} GiB the largest whole tensor, built on meta",
        )
    group = width * largest(stage.largest_layer, stage.edges)
    return Term(
        shards + group, lambda: f"{gib(shards)} GiB shards + {gib(group)} GiB the largest group, still whole"
    )


class _Groups(NamedTuple):
    """Bytes that one group of ``fully_shard`` moves: a decoder layer's, and the root's."""

    layer: int
    """A layer's gathered parameters."""
    root: int
    """Embedding, final norm and head, gathered until the end of backward."""
    staging: int
    """A layer's all-gather output beside its parameters; one rank alone copies without any."""
    dense: int
    """The gathered parameters of a layer without experts, where others have them; 0: all layers are alike."""
    kept: int
    """Gathered layers that forward leaves for backward."""
    gradient: int
    """A layer's whole gradients, as autograd makes them."""
    reduction: int
    """A layer's reduce-scatter input."""
    head: int
    """The gradient of the head's weight."""
    embedding: int
    """With tp the embedding's gradient is made whole, and then cut: DTensor's backward of it knows no cut of
    the vocabulary (torch, tensor/_ops/_embedding_ops.py)."""
    left_over: int
    """The root's reduce-scatter input of the micro-batch before, held until the next reduction."""
    root_gradient: int
    root_reduction: int
    shard: int
    """A layer's part of the sharded gradients."""


def _groups(plan: Plan, stage: Stage) -> _Groups:
    layout: Any = plan.layout
    width = widths[plan.recipe.precision]
    ranks = plan.degrees.shard * plan.degrees.cp
    has_adapters, layers = plan.recipe.has_adapters, largest(1, stage.num_layers)
    # Every tensor is cut into rows for each rank, the last ones padded: eight experts on 32 ranks become 32.
    edge_shard, largest_shard = stage.edge_shard, stage.largest_shard
    adapters_whole = ranks * stage.trainable_shard if has_adapters else 0
    layer = width.compute * (ranks * largest_shard + adapters_whole // layers)
    all_layers = width.compute * (ranks * (stage.shard - edge_shard) + adapters_whole)
    reshard = layout.reshard_after_forward
    kept = 0
    if reshard is False:
        kept = all_layers
    elif reshard is not True:
        kept = where(reshard == ranks, 0, all_layers // reshard)
    trained = stage.adapters // layers if has_adapters else stage.largest_layer
    edges = 0 if has_adapters else stage.edges
    root_reduction = 0 if has_adapters else width.reduce * ranks * edge_shard
    return _Groups(
        layer=layer,
        root=width.compute * ranks * edge_shard,
        staging=(ranks > 1) * layer,
        dense=width.compute * ranks * _dense_shard(plan, stage, ranks),
        kept=kept,
        gradient=width.compute * trained,
        reduction=width.reduce * (adapters_whole // layers)
        if has_adapters
        else layer // width.compute * width.reduce,
        head=0 if has_adapters else width.compute * stage.head,
        embedding=(plan.degrees.tp > 1)
        * stage.is_first
        * (width.compute * plan.architecture.vocab_size * plan.architecture.hidden_size),
        left_over=(plan.num_micro_batches > 1) * root_reduction,
        root_gradient=width.compute * edges,
        root_reduction=root_reduction,
        shard=width.original * (ceil_div(adapters_whole, layers * ranks) if has_adapters else largest_shard),
    )


def _dense_shard(plan: Plan, stage: Stage, ranks: int) -> Any:
    """Weights that one rank keeps of a layer without experts, of which a model with experts may have a few
    first, padding included; or 0."""
    arch, degrees = plan.architecture, plan.degrees
    if len(layers_by_kind(arch, stage)) == 1:
        return 0
    has_both = (stage.num_moe_layers > 0) & (stage.num_moe_layers < stage.num_layers)
    return has_both * looked_up(
        lambda tp, ep, ranks: layer_shard(arch, False, tp, ep, ranks).dense_padded,
        degrees.tp,
        degrees.ep,
        ranks,
    )


def _gathered_forward(layout: Fsdp2Layout, groups: _Groups) -> Term:
    """At the loss: the root group, what forward left, and the last all-gather's output."""
    return Term(
        groups.root + groups.staging + groups.kept + groups.left_over,
        lambda: (
            f"{gib(groups.root)} GiB root group (embedding, final norm, head) + {gib(groups.staging)} GiB "
            "last all-gather"
            + (
                f" + {gib(groups.kept)} GiB layers kept after forward "
                f"(reshard_after_forward={layout.reshard_after_forward})"
                if groups.kept
                else ""
            )
            + (
                f" + {gib(groups.left_over)} GiB reduce-scatter input of the micro-batch before"
                if groups.left_over
                else ""
            )
        ),
    )


def _backward(plan: Plan, stage: Stage, shape: Backward, groups: _Groups, trained: int) -> list[Peak]:
    """The loss, the final norm, layers of both ends, the embedding, and the root's own reduction."""
    layout: Any = plan.layout
    whole = layout.reshard_after_forward is False
    prefetched = 0 if whole else groups.staging
    full = shape.layers + shape.edges + shape.cast
    tied = plan.architecture.tie_word_embeddings
    # A tied head's gradient waits inside of autograd for the embedding's, no parameter's yet.
    held_head = groups.head if tied else 0
    root = groups.root + (0 if tied else groups.head)

    accumulates = plan.num_micro_batches > 1
    # A third of a layer's gradients are there inside its feed-forward; where experts are large, none yet
    # while their rows are weighted, or all of them.
    part, inside = _larger_sum(
        (groups.gradient // 3, shape.inside),
        (0, shape.earlier),
        ((shape.later != shape.inside) * groups.gradient, shape.later),
    )

    def gradients(done: int) -> Term:
        held = where(accumulates, trained, smallest(trained, done * groups.shard))
        return Term(held, lambda: f"{gib(held)} GiB shards of {count(done, 'layer')} reduced so far")

    def layer(done: int) -> list[Peak]:
        """In the layer after ``done`` others, and right after it, with its gradients whole."""
        left = stage.num_layers - done
        # Dense layers of a model with experts save less than those: what is left is never less than nothing.
        activations = largest(shape.saved, shape.layers - done * shape.saved)
        # Layers without experts come first, and so last in backward.
        smaller = (groups.dense > 0) & (done + 1 >= stage.num_moe_layers)
        coming = where(smaller, smallest(prefetched, groups.dense), prefetched)
        others = root + groups.kept * (left - 1) // stage.num_layers + coming * (left > 1)
        before = where(done > 0, groups.reduction, groups.left_over)
        base = others + groups.layer + before
        # Whole gradients beside parameters; then beside their reduce-scatter input; then that and its output.
        reducing, reduced = others + groups.reduction + groups.gradient, others + groups.reduction
        after = (
            (base + groups.gradient, "root group, layers in use, one layer's gradients"),
            (reducing, "root group, one layer's gradients and their reduce-scatter input"),
            (reduced, "root group, one layer's reduce-scatter input"),
        )
        held, num_reduced = _fullest_after(after[0][0], reducing, reduced, groups.shard)
        held_words = next((words for num_bytes, words in after if num_bytes is held), "")
        fraction = 0.36 + 0.6 * done / stage.num_layers
        arriving = root + groups.kept * (left - 1) // stage.num_layers + groups.layer + before
        return [
            Peak(
                fraction - 0.005,
                _held(activations + shape.stream + held_head, "saved by the layers left"),
                _gathered(arriving + prefetched, "root group, a layer's parameters and all-gather output"),
                gradients(done),
            ),
            Peak(
                fraction,
                _held(activations + inside + held_head, "saved, and gradients inside one layer"),
                _gathered(base + part, "root group, layers in use, first gradients"),
                gradients(done),
            ),
            Peak(
                fraction + 0.01,
                _held(activations - shape.saved + 2 * shape.stream + held_head, "saved by the layers left"),
                _gathered(held, held_words),
                gradients(done + num_reduced),
            ),
        ]

    last = where(groups.dense > 0, groups.reduction * groups.dense // groups.layer, groups.reduction)
    root_whole = groups.root + groups.root_gradient + last
    deepest = where(groups.dense > 0, stage.num_moe_layers, stage.num_layers) - 1
    none = gradients(0)
    last_layer = shape.layers - shape.saved
    # The all-gather output before is let go only after the next one is copied out (wait_for_unshard).
    before_it = where(stage.num_layers > 1, groups.staging, groups.root * (groups.staging > 0))
    return [
        Peak(
            0.32,
            _held(largest(0, last_layer), "saved by all layers but the last"),
            _gathered(
                groups.root
                + groups.kept * (stage.num_layers - 1) // stage.num_layers
                + groups.layer
                + groups.staging
                + before_it
                + groups.left_over,
                "root group, the last layer's parameters, its all-gather output and the one before",
            ),
            none,
            phase="forward",
        ),
        Peak(
            0.34,
            _held(full, "all that forward saved"),
            _gathered(
                groups.root + prefetched + groups.kept + groups.left_over,
                "root group, next layer's all-gather",
            ),
            none,
            logits=shape.logits,
        ),
        Peak(
            0.35,
            _held(full + shape.norm + held_head, "all that forward saved, and the final norm's gradients"),
            _gathered(
                root + prefetched + groups.kept + groups.left_over,
                "root group, its head's gradient, next all-gather",
            ),
            none,
        ),
        *(peak for done in places(deepest) for peak in layer(done)),
        Peak(
            0.97,
            _held(
                shape.stream + 2 * held_head + groups.embedding, "the embedding's gradient, and a tied head's"
            ),
            _gathered(root_whole, "root group, its gradients, last layer's reduce-scatter"),
            gradients(stage.num_layers),
        ),
        Peak(
            0.975,
            no_bytes("all are used up"),
            _gathered(
                groups.root_gradient + groups.root_reduction, "root gradients, and their reduce-scatter"
            ),
            gradients(stage.num_layers),
        ),
        Peak(
            0.978,
            no_bytes("all are used up"),
            _gathered(groups.root_reduction, "the root's reduce-scatter input"),
            Term(trained, lambda: f"{gib(trained)} GiB all shards"),
        ),
    ]


def _fullest_after(whole: Any, reducing: Any, reduced: Any, shard: int) -> tuple[Any, Any]:
    """The most that is staged right after a layer, and whether its own gradients are shards by then."""
    own = [num_bytes + shard * (num_bytes == reduced) for num_bytes in (whole, reducing, reduced)]
    held = where(own[1] > own[0], reducing, whole)
    held = where(own[2] > largest(own[0], own[1]), reduced, held)
    return held, held == reduced


def _larger_sum(*pairs: tuple[Any, Any]) -> tuple[Any, Any]:
    found = pairs[0]
    for pair in pairs[1:]:
        found = where(sum(pair) > sum(found), pair, found)
    return found


def _held(num_bytes: int, words: str) -> Term:
    return Term(num_bytes, lambda: f"{gib(num_bytes)} GiB: {words}, operator by operator")


def _gathered(num_bytes: int, words: str) -> Term:
    return Term(num_bytes, lambda: f"{gib(num_bytes)} GiB: {words} (torch.distributed.fsdp, fully_shard)")
