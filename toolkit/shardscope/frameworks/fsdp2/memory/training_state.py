"""FSDP2's training state: tensors sharded along dimension 0, all-gathered one decoder layer at a time.

Source: ``torch.distributed.fsdp`` (``_fully_shard/_fsdp_param.py``, ``_fsdp_collectives.py``). Sharded
originals stay in their own type (a frozen base in the compute type: it is never updated), groups are
all-gathered in the compute type, gradients are reduce-scattered in the reduction type, and the next layer is
prefetched while one computes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from shardscope.core.number_format import gib
from shardscope.core.ops import group_equal, maximum
from shardscope.core.precision import base_width, widths
from shardscope.frameworks.fsdp2.memory.groups import compute_groups
from shardscope.frameworks.fsdp2.memory.peaks import compute_gathered_at_loss
from shardscope.frameworks.fsdp2.memory.pipeline import (
    NOTHING_WAITS,
    is_pipelined,
    received,
    unreduced,
    waiting,
)
from shardscope.frameworks.fsdp2.memory.quantized import compute_scales, count_saved_in_stage
from shardscope.frameworks.fsdp2.memory.stage_peaks import peaks
from shardscope.memory.overheads.building import is_initialized_sharded
from shardscope.memory.report import Term, zero_term
from shardscope.memory.state.optimizer_state import compute_optimizer_bytes
from shardscope.memory.state.stages import (
    Stage,
    StageShape,
    StageShapes,
    count_layers_by_kind,
    count_stage_weights,
    find_stage_shapes,
    list_outer_tensors,
    list_rank_shapes,
)
from shardscope.memory.state.training_state import TrainingState

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.plan import Plan


counts_neighbours = True
"""Whether a stage's memory depends on the stages around it: a middle stage receives from both sides, and so
may need more than an earlier stage with more layers."""


def find_shapes(plan: Plan) -> StageShapes:
    """Return the stage shapes of ``torch.distributed.pipelining``, or the one shape of the whole model."""
    return find_stage_shapes(plan.architecture, plan.stage_layers)


def count_weights(plan: Plan, shape: StageShape) -> Stage:
    """Return the weights of one stage."""
    return count_stage_weights(plan, shape)


def compute_training_state(plan: Plan, stage: Stage) -> TrainingState:
    """Return one rank's training state, in bytes.

    It has the sharded originals, gradients and optimizer state, and the buffers of all-gathers and
    reduce-scatters.
    """
    layout: Any = plan.layout
    degrees, recipe = plan.degrees, plan.recipe
    width, each = widths[recipe.precision], base_width(recipe)
    ranks = group_equal(degrees.shard * degrees.cp)
    optimizer = compute_optimizer_bytes(plan, stage, width.original, ranks, library="torchao")
    trained = width.original * stage.trainable_shard
    scales = compute_scales(plan, stage)
    base = each * (stage.shard - count_saved_in_stage(plan, stage, ranks)) + scales
    parameters = base + (trained if recipe.has_adapters else 0)
    # CPU ranks train in host memory, so offloading moves nothing.
    on_host = layout.offload == "cpu" and plan.on_gpu

    def parameter_words() -> str:
        if recipe.base_quantization is not None:
            return (
                f"{gib(base)} GiB of {stage.base:,} frozen weights, Linears in NF4, stored as numbers of "
                f"{each} bytes / {ranks} ranks, of which {gib(scales)} GiB scales, whole on each + "
                f"{stage.adapters:,} of adapters × {width.original} bytes / {ranks} (Dettmers et al. 2023, "
                "bitsandbytes)"
            )
        if recipe.has_adapters:
            return (
                f"({stage.base:,} frozen × {each} bytes + {stage.adapters:,} of adapters × {width.original} "
                f"bytes) / {ranks} ranks, each tensor's rows rounded up (fully_shard keeps the sharded "
                "originals; what never updates has none in fp32)"
            )
        return (
            f"{stage.base:,} parameters × {width.original} bytes / {ranks} ranks, each tensor's rows rounded "
            "up (fully_shard keeps the sharded originals)"
        )

    groups = compute_groups(plan, stage)
    pipelined = is_pipelined(plan)
    waits = waiting(plan, stage) if pipelined else NOTHING_WAITS
    # With HSDP the all-reduced gradients stay on the GPU until backward ends, even with offloaded gradients.
    here: Any = 1 if not on_host else degrees.replicate > 1
    away = zero_term("in host memory (CPUOffloadPolicy)")
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
        gather_forward=compute_gathered_at_loss(plan, stage, groups, waits),
        gather_rest=received(waits, plan) if pipelined else None,
        gradients_accumulated=unreduced(plan, 0 if on_host else trained) if pipelined else None,
        initialisation={} if on_host else {"parameters": _compute_initialisation(plan, stage, parameters)},
        find_backward_peaks=lambda shape: peaks(plan, stage, shape, groups, waits, here * trained),
        group_sizes=(ranks, degrees.replicate, degrees.tp, degrees.pp),
        host_bytes=parameters + trained + optimizer.state.num_bytes if on_host else 0,
    )


def _compute_initialisation(plan: Plan, stage: Stage, shards: int) -> Term:
    """Return the peak while the parameters are initialized.

    Large models are initialized on the GPU, one unsharded tensor at a time; small ones are moved from the
    host, one unsharded group at a time.
    """
    width = base_width(plan.recipe)
    if is_initialized_sharded(plan):
        whole = width * _find_largest_matrix(plan.architecture, stage)
        return Term(
            shards + whole,
            lambda: f"{gib(shards)} GiB shards + {gib(whole)} GiB the largest whole matrix, built on meta",
        )
    group = width * maximum(stage.largest_layer, stage.edges)
    return Term(
        shards + group, lambda: f"{gib(shards)} GiB shards + {gib(group)} GiB the largest group, still whole"
    )


def _find_largest_matrix(arch: Architecture, stage: Stage) -> Any:
    """Return the elements of a stage's largest unsharded matrix: each is initialized before it is sharded."""
    outer = list_outer_tensors(arch, 1, stage.is_first, stage.is_last)
    layers = [
        (count > 0) * _find_largest_in_layer(arch, moe) for moe, count in count_layers_by_kind(arch, stage)
    ]
    return maximum(0, *(rows * columns for _, rows, columns in outer), *layers)


@lru_cache(maxsize=1024)
def _find_largest_in_layer(arch: Architecture, moe: bool) -> int:
    return max(one.rows * one.columns for one in list_rank_shapes(arch, moe, 1, 1))
