"""ZeRO's placement of one layer: ranges of a flat buffer (stages 1 and 2), or a part of every tensor (3)."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from shardscope.core.ops import ceil_div
from shardscope.core.precision import widths
from shardscope.frameworks.deepspeed.layout import get_layout
from shardscope.frameworks.deepspeed.memory.element_counts import count_expert_replicas
from shardscope.frameworks.deepspeed.memory.partition_parameters import list_stage_tensors, split_by_decay
from shardscope.frameworks.deepspeed.memory.zero_optimizer_stage_1_and_2 import is_reduced_late
from shardscope.memory.state.layer_sharding import (
    StateSharding,
    join_intervals,
    replicate,
    slice_buffer,
    slice_evenly,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardscope.core.plan import Plan
    from shardscope.memory.state.layer_sharding import Interval, Slices
    from shardscope.memory.state.stages import Stage

_SOURCE = "Rajbhandari et al. 2020, section 5; deepspeed/runtime/zero"


def list_chunk_layers(plan: Plan) -> list[int]:
    """Return the layers of each pipeline stage."""
    return list(plan.stage_layers)


def shard_layer(plan: Plan, stage: Stage, layer: int) -> StateSharding:
    """Return where the state of a layer of ``stage`` is; ``layer`` is its position on the stage."""
    layout, degrees = get_layout(plan), plan.degrees
    tensors = list_stage_tensors(plan, stage)
    num_experts = 0
    if degrees.ep > 1 and stage.num_moe_layers and not plan.recipe.has_adapters:
        num_experts = len(tensors.experts) // stage.num_moe_layers
    moe_position = layer - (stage.num_layers - stage.num_moe_layers)
    first = tensors.trained_before + sum(tensors.trained_per_layer[:layer])
    of_layer = range(first, first + tensors.trained_per_layer[layer])
    main = _shard_group(plan, tensors.trained, tensors.is_vector, of_layer, degrees.data_parallel)
    if not num_experts or moe_position < 0:
        return main
    of_experts = range(moe_position * num_experts, (moe_position + 1) * num_experts)
    replicas = count_expert_replicas(degrees.data_parallel, degrees.ep)
    if layout.stage == 3:
        return main
    return main._replace(experts=_shard_group(plan, tensors.experts, (), of_experts, replicas))


def _shard_group(
    plan: Plan, sizes: tuple[int, ...], is_vector: tuple[bool, ...], of_layer: range, ranks: int
) -> StateSharding:
    """Return the sharding of the tensors ``of_layer`` of one parameter group over its ``ranks``."""
    layout, whole = get_layout(plan), replicate(ranks)
    state = StateSharding(
        parameters=whole,
        gradients=whole,
        optimizer=whole,
        cut="ZeRO-0 shards nothing: every rank has the whole training state.",
        source=_SOURCE,
        buffers_gradients=True,
        keeps_whole_buffer=True,
    )
    if layout.stage == 0:
        return state
    if layout.stage == 3:
        slices = slice_evenly(ranks, ranks)
        hpz = layout.zero_hpz_partition_size
        return StateSharding(
            parameters=slices,
            gradients=slices,
            optimizer=slices,
            cut=f"ZeRO-3 flattens every tensor of the layer and cuts it into {ranks} equal parts.",
            source=_SOURCE,
            gathers_for_passes=True,
            after_forward=slice_evenly(ranks, hpz) if hpz > 1 else None,
        )
    owned, kept, kept_elements = _slice_flat_buffers(sizes, is_vector, of_layer, ranks)
    half = widths[plan.recipe.precision].compute
    return state._replace(
        gradients=kept,
        optimizer=owned,
        gradient_bytes=tuple(half * elements for elements in kept_elements),
        buffers_gradients=is_reduced_late(
            layout.stage, bool(layout.overlap_comm), plan.num_micro_batches > 1
        ),
        keeps_whole_buffer=False,
        cut=f"All layers lie one after another in a flat buffer, which is cut into {ranks} equal partitions: "
        "a layer's optimizer state is on the few ranks whose partition it overlaps, and these keep the "
        "gradients of whole tensors.",
    )


def _slice_flat_buffers(
    sizes: tuple[int, ...], is_vector: tuple[bool, ...], of_layer: range, ranks: int
) -> tuple[Slices, Slices, list[int]]:
    """Return a layer's parts in each rank's partitions, the tensors that overlap them, and their elements.

    Matrices and vectors have a flat buffer each (``split_by_decay``), padded to twice the ranks.
    """
    flags = is_vector or (False,) * len(sizes)
    partitions = [ceil_div(sum(group), 2 * ranks) * 2 for group in split_by_decay(sizes, is_vector)]
    starts: list[int] = []
    filled = [0, 0]
    for size, flag in zip(sizes, flags, strict=True):
        starts.append(filled[flag])
        filled[flag] += size
    total = max(1, sum(sizes[index] for index in of_layer))
    owned: list[list[Interval]] = [[] for _ in range(ranks)]
    kept: list[list[Interval]] = [[] for _ in range(ranks)]
    elements = [0] * ranks
    offsets: Sequence[int] = [0, *accumulate(sizes[index] for index in of_layer)]
    for index, offset in zip(of_layer, offsets, strict=False):
        size, flag = sizes[index], flags[index]
        for rank, parts in enumerate(slice_buffer([(starts[index], size)], partitions[flag], ranks)):
            if parts:
                elements[rank] += size
                kept[rank].append((offset / total, (offset + size) / total))
            owned[rank] += [((offset + a * size) / total, (offset + b * size) / total) for a, b in parts]
    return (
        tuple(join_intervals(parts) for parts in owned),
        tuple(join_intervals(parts) for parts in kept),
        elements,
    )
