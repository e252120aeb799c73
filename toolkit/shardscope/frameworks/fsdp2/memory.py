"""FSDP2's training state: every tensor cut along its first dimension, gathered one decoder layer at a time.

Read off ``torch.distributed.fsdp`` (``_fully_shard/_fsdp_param.py``, ``_fsdp_collectives.py``): sharded
originals stay in their own type, groups are gathered in the compute type, gradients are reduce-scattered in
the reduction type, and while one layer computes the next is already on its way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardscope.memory.optimizer_state import optimizer_bytes
from shardscope.memory.precision import widths
from shardscope.memory.report import Term, no_bytes
from shardscope.memory.stages import Stage, stages_of
from shardscope.memory.state import TrainingState
from shardscope.memory.words import gib

if TYPE_CHECKING:
    from shardscope.frameworks.fsdp2.layout import Fsdp2Layout
    from shardscope.plan import Plan


def stages(plan: Plan) -> list[Stage]:
    """Stages of ``torch.distributed.pipelining``, or the one of the whole model."""
    return stages_of(plan)


def training_state(plan: Plan, stage: Stage) -> TrainingState:
    """Sharded originals, gradients and moments; gathered layers and reductions as staging."""
    layout: Any = plan.layout
    degrees, recipe = plan.degrees, plan.recipe
    width = widths[recipe.precision]
    ranks = degrees.shard * degrees.cp
    optimizer = optimizer_bytes(plan, stage, width.original, ranks, library="torchao")
    trained = width.original * stage.trainable_shard
    parameters = width.original * stage.shard + (trained if stage.adapters else 0)
    # On CPU ranks the host's memory is the rank's own, and offloading moves nothing.
    on_host = layout.offload == "cpu" and plan.on_gpu

    def parameter_words() -> str:
        if stage.adapters:
            return (
                f"({stage.base:,} frozen + {stage.adapters:,} of adapters) × {width.original} bytes / "
                f"{ranks} ranks, each tensor's rows rounded up (fully_shard keeps the sharded originals)"
            )
        return (
            f"{stage.base:,} parameters × {width.original} bytes / {ranks} ranks, each tensor's rows rounded "
            "up (fully_shard keeps the sharded originals)"
        )

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
        gather_forward=_gathered_forward(layout, stage, width.compute),
        gather_backward=_gathered_backward(stage, width.compute, width.reduce),
        gather_layer=_gathered_layer(stage, width.compute, width.reduce),
        group_sizes=(ranks, degrees.replicate, degrees.tp, degrees.pp),
        host_bytes=parameters + trained + optimizer.state.num_bytes if on_host else 0,
    )


def _gathered_forward(layout: Fsdp2Layout, stage: Stage, compute: int) -> Term:
    """At the end of forward: the root group, and the layers that were not resharded or are prefetched."""
    root = compute * stage.edges
    if layout.reshard_after_forward is False:
        layers = compute * (stage.layers + stage.experts)
        return Term(
            root + layers,
            lambda: (
                f"{gib(root)} GiB root group + {gib(layers)} GiB all layers, kept after forward "
                "(reshard_after_forward=False)"
            ),
        )
    layer = compute * stage.largest_layer
    kept = 0
    if layout.reshard_after_forward is not True:
        kept = compute * (stage.layers + stage.experts) // layout.reshard_after_forward
    return Term(
        root + layer + kept,
        lambda: (
            f"{gib(root)} GiB root group (embedding, final norm, head) + {gib(layer)} GiB all-gather of the "
            "layer that backward needs first"
            + (f" + {gib(kept)} GiB resharded within the node" if kept else "")
        ),
    )


def _gathered_layer(stage: Stage, compute: int, reduce: int) -> Term:
    """While backward is in a layer: root group, gradient of the head, two layers, one layer's reduction."""
    root = compute * stage.edges
    head = 0 if stage.adapters else compute * stage.head
    layers = 2 * compute * stage.largest_layer
    trained_layer = stage.adapters // max(1, stage.num_layers) if stage.adapters else stage.largest_layer
    reduction = (compute + reduce) * trained_layer
    return Term(
        root + head + layers + reduction,
        lambda: (
            f"{gib(root)} GiB root group + {gib(head)} GiB gradient of the head + {gib(layers)} GiB two "
            f"gathered layers + {gib(reduction)} GiB one layer's gradients and their reduce-scatter input"
        ),
    )


def _gathered_backward(stage: Stage, compute: int, reduce: int) -> Term:
    """At the end of backward the root group's gradients are all there, and reduced beside a layer's."""
    layer = _gathered_layer(stage, compute, reduce)
    rest = 0 if stage.adapters else compute * (stage.edges - stage.head) + reduce * stage.edges
    return Term(
        layer.num_bytes + rest,
        lambda: (
            f"{layer.explain()} + {gib(rest)} GiB the root's other gradients and its reduce-scatter input"
        ),
    )
