"""FSDP2's training state: tensors sharded along dimension 0, all-gathered one decoder layer at a time.

Source: ``torch.distributed.fsdp`` (``_fully_shard/_fsdp_param.py``, ``_fsdp_collectives.py``). Sharded
originals stay in their own type (a frozen base in the compute type: it is never updated), groups are
all-gathered in the compute type, gradients are reduce-scattered in the reduction type, and the next layer is
prefetched while one computes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from shardscope.core.number_format import format_gib
from shardscope.core.ops import all_true, cache_by_numbers, group_equal, maximum
from shardscope.core.precision import get_base_width, widths
from shardscope.frameworks.fsdp2.layout import get_layout
from shardscope.frameworks.fsdp2.memory.groups import compute_groups
from shardscope.frameworks.fsdp2.memory.peaks import StepPeaks, compute_gathered_at_loss
from shardscope.frameworks.fsdp2.memory.pipeline_buffers import (
    build_accumulated_gradients,
    build_receive_buffers,
    compute_pipeline_buffers,
)
from shardscope.frameworks.fsdp2.memory.pipeline_peaks import PipelinePeaks
from shardscope.frameworks.fsdp2.memory.quantized import compute_scales, count_base_shard
from shardscope.memory.overheads.building import is_initialized_sharded
from shardscope.memory.report import Term, zero_term
from shardscope.memory.state.optimizer_state import compute_optimizer_bytes
from shardscope.memory.state.stages import (
    Stage,
    StageShape,
    StageShapes,
    count_by_kind,
    count_stage_weights,
    find_stage_shapes,
    list_outer_tensors,
    list_rank_shapes,
)
from shardscope.memory.state.training_state import PeakCandidate, TrainingState

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.plan import Plan
    from shardscope.memory.activations.stage_activations import StageBackward
    from shardscope.memory.report import Component


counts_neighbours = True
branches_on_stages = True
UNEVEN = 1.1
"""Ratio of the fullest rank's part to an even one from which the explanation names the fullest rank."""


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
    degrees = plan.degrees
    width = widths[plan.recipe.precision]
    ranks = group_equal(degrees.shard * degrees.cp)
    # Sharded originals, gradients and optimizer state of one rank.
    parameters = _compute_parameters(plan, stage, ranks)
    trained = width.original * stage.trainable_shard
    gradients = Term(
        trained,
        lambda: f"{stage.trainable:,} gradients × {width.original} bytes / {ranks} ranks, reduce-scattered",
    )
    optimizer = compute_optimizer_bytes(plan, stage, width.original, ranks, library="torchao")
    # Buffers of the groups and, with pp > 1, of the pipeline. The plans of one batch agree on pp > 1.
    groups = compute_groups(plan, stage)
    pipeline = compute_pipeline_buffers(plan, stage) if all_true(degrees.pp > 1) else None
    # CPU ranks train in host memory, so offloading moves nothing. With HSDP the all-reduced gradients stay
    # on the GPU until backward ends, even with offloaded gradients.
    offloads = get_layout(plan).offload == "cpu" and plan.on_gpu
    gradients_on_gpu = (degrees.replicate > 1) * trained if offloads else trained

    def find_backward_peaks(backward: StageBackward) -> list[PeakCandidate]:
        if pipeline is None:
            return StepPeaks(plan, stage, backward, groups, gradients_on_gpu).list_candidates()
        return PipelinePeaks(plan, stage, backward, groups, gradients_on_gpu, pipeline).list_candidates()

    initialisation: dict[Component, Term] = {}
    if not offloads:
        initialisation["parameters"] = _compute_initialisation(plan, stage, parameters.num_bytes)
    state = TrainingState(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer.state,
        optimizer_working=optimizer.working,
        gather_forward=compute_gathered_at_loss(plan, stage, groups, pipeline),
        gather_rest=None if pipeline is None else build_receive_buffers(pipeline, plan),
        gradients_accumulated=None if pipeline is None else build_accumulated_gradients(plan, trained),
        find_backward_peaks=find_backward_peaks,
        initialisation=initialisation,
        group_sizes=(ranks, degrees.replicate, degrees.tp, degrees.pp),
    )
    if not offloads:
        return state
    # The optimizer runs on the host, where its state and temporary memory are, too.
    on_host = zero_term("in host memory (CPUOffloadPolicy)")
    return state._replace(
        parameters=on_host,
        gradients=on_host,
        optimizer=on_host,
        optimizer_working=on_host,
        gradients_accumulated=None if pipeline is None else build_accumulated_gradients(plan, 0),
        host_bytes=parameters.num_bytes + trained + optimizer.state.num_bytes,
    )


def _compute_parameters(plan: Plan, stage: Stage, ranks: int) -> Term:
    """Return the sharded originals: the trained weights, and the frozen base under adapters."""
    recipe = plan.recipe
    width, frozen_width = widths[recipe.precision], get_base_width(recipe)
    # The scales of a quantized base are no parameters and so not sharded.
    scales = compute_scales(plan, stage) if recipe.base_quantization is not None else 0
    base = frozen_width * count_base_shard(plan, stage, ranks) + scales
    # Without adapters the base is what trains; its frozen width is then that of the originals.
    adapters = width.original * stage.trainable_shard if recipe.has_adapters else 0

    def explain() -> str:
        if recipe.base_quantization is not None:
            return (
                f"{format_gib(base)} GiB of {stage.base:,} frozen weights, Linears in NF4, stored as "
                f"numbers of {frozen_width} bytes / {ranks} ranks, of which {format_gib(scales)} GiB scales, "
                f"unsharded on each + {stage.adapters:,} of adapters × {width.original} bytes / {ranks} "
                "(Dettmers et al. 2023, bitsandbytes)"
            )
        if stage.shard * ranks > UNEVEN * stage.base:
            numbers = f"{stage.shard:,} of {stage.base:,} parameters × {frozen_width} bytes"
            if recipe.has_adapters:
                numbers += f" + {stage.trainable_shard:,} of adapters × {width.original} bytes"
            return (
                f"{numbers} on the fullest of {ranks} ranks (fully_shard keeps "
                "the sharded originals, of which a rank has whole rows: of stacked experts whole experts)"
            )
        if recipe.has_adapters:
            return (
                f"({stage.base:,} frozen × {frozen_width} bytes + {stage.adapters:,} of adapters × "
                f"{width.original} bytes) / {ranks} ranks, each tensor's rows rounded up (fully_shard keeps "
                "the sharded originals; frozen weights have none in fp32)"
            )
        return (
            f"{stage.base:,} parameters × {width.original} bytes / {ranks} ranks, each tensor's rows rounded "
            "up (fully_shard keeps the sharded originals)"
        )

    return Term(base + adapters, explain)


def _compute_initialisation(plan: Plan, stage: Stage, shards: int) -> Term:
    """Return the peak while the parameters are initialized.

    Large models are initialized on the GPU, one unsharded tensor at a time; small ones are moved from the
    host, one unsharded group at a time.
    """
    width = get_base_width(plan.recipe)
    if is_initialized_sharded(plan):
        matrix = width * _find_largest_matrix(
            plan.architecture, stage.is_first, stage.is_last, stage.num_layers, stage.num_moe_layers
        )
        return Term(
            shards + matrix,
            lambda: (
                f"{format_gib(shards)} GiB shards + {format_gib(matrix)} GiB the largest unsharded matrix, "
                "built on meta"
            ),
        )
    # fully_shard moves a group's parameters to the GPU before it shards them (_fsdp_init.py,
    # _move_states_to_device), and is called group by group.
    group = width * maximum(stage.largest_layer, stage.edges)
    return Term(
        shards + group,
        lambda: (
            f"{format_gib(shards)} GiB shards + {format_gib(group)} GiB the largest group, still unsharded"
        ),
    )


@cache_by_numbers
def _find_largest_matrix(
    arch: Architecture, is_first: bool, is_last: bool, num_layers: int, num_moe_layers: int
) -> int:
    """Return the elements of a stage's largest unsharded matrix: each is initialized before it is sharded."""
    # Unsharded: tp = ep = ranks = 1.
    outer = list_outer_tensors(arch, 1, is_first, is_last)
    layers = [
        (count > 0) * _find_largest_in_layer(arch, moe)
        for moe, count in count_by_kind(arch, num_layers, num_moe_layers)
    ]
    return maximum(0, *(rows * columns for _, rows, columns in outer), *layers)


@lru_cache(maxsize=1024)
def _find_largest_in_layer(arch: Architecture, moe: bool) -> int:
    return max(shape.rows * shape.columns for shape in list_rank_shapes(arch, moe, 1, 1))
