"""Megatron's placement of one layer: whole parameters and gradients, a range of the optimizer's buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.core.ops import ceil_div
from shardscope.frameworks.megatron.core_config import MAKE_VOCAB_SIZE_DIVISIBLE_BY
from shardscope.frameworks.megatron.layout import count_replicas, get_layout
from shardscope.frameworks.megatron.memory.pipeline import count_chunk_layers
from shardscope.frameworks.megatron.timing import count_buckets
from shardscope.memory.state.layer_sharding import (
    Slices,
    StateSharding,
    join_intervals,
    replicate,
    slice_buffer,
)
from shardscope.memory.state.stages import EMBEDDING_GROUPS, count_layer_shard, list_outer_tensors

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.state.stages import Stage

_SOURCE = (
    "Shoeybi et al. 2019, section 3; Megatron-LM, docs/source/api-guide/dist_optimizer.md and "
    "core/distributed/param_and_grad_buffer.py"
)


def list_chunk_layers(plan: Plan) -> list[int]:
    """Return the layers of each model chunk in the model's order: chunk c of stage s is number c x pp + s."""
    arch, degrees = plan.architecture, plan.degrees
    by_stage = [count_chunk_layers(arch, degrees.pp, degrees.vpp, stage) for stage in range(degrees.pp)]
    return [sum(by_stage[stage][chunk]) for chunk in range(degrees.vpp) for stage in range(degrees.pp)]


def shard_layer(plan: Plan, stage: Stage, layer: int) -> StateSharding:
    """Return where the state of a layer of ``stage`` is; ``layer`` is its position on the stage.

    The distributed optimizer's buffer has the stage's weights from the last to the first (``params[::-1]``),
    in one bucket for each model chunk, or in several if the first stage's reduction overlaps with backward.
    Each rank owns a range of every bucket. Buckets end with a tensor; here they are of equal size.
    """
    arch, degrees = plan.architecture, plan.degrees
    replicas, tp = count_replicas(plan), plan.degrees.tp
    is_moe = layer >= stage.num_layers - stage.num_moe_layers
    outer = list_outer_tensors(
        arch, tp, int(stage.is_first), int(stage.is_last), MAKE_VOCAB_SIZE_DIVISIBLE_BY * tp
    )
    behind_layers = sum(rows * columns for name, rows, columns in outer if name not in EMBEDDING_GROUPS)
    # Weights of the later layers, which come before this one in the buffer; those with experts are last.
    later = stage.num_layers - 1 - layer
    later_moe = min(later, stage.num_moe_layers)
    dense, experts = {False: 0, True: 0}, 0
    if stage.num_layers > stage.num_moe_layers:
        dense[False] = count_layer_shard(arch, False, tp, degrees.ep, 1).dense
    if stage.num_moe_layers:
        dense[True] = count_layer_shard(arch, True, tp, degrees.ep, 1).dense
        experts = count_layer_shard(arch, True, get_layout(plan).expert_tp, degrees.ep, 1).experts
    has_expert_buffer = degrees.ep > 1 and stage.experts > 0
    in_buffer = 0 if has_expert_buffer else experts
    start = behind_layers + (later - later_moe) * dense[False] + later_moe * (dense[True] + in_buffer)
    elements = dense[is_moe] + is_moe * in_buffer
    total = stage.layers + stage.edges + (0 if has_expert_buffer else stage.experts)
    main = _shard_buffer(plan, stage, start, elements, total, replicas.dense)
    if not (has_expert_buffer and is_moe):
        return main
    return main._replace(
        experts=_shard_buffer(plan, stage, later_moe * experts, experts, stage.experts, replicas.experts)
    )


def _shard_buffer(
    plan: Plan, stage: Stage, start: int, elements: int, total: int, ranks: int
) -> StateSharding:
    """Return the sharding of ``elements`` weights at ``start`` of a buffer of ``total`` weights."""
    layout, whole = get_layout(plan), replicate(ranks)
    state = StateSharding(
        parameters=whole,
        gradients=whole,
        optimizer=whole,
        cut="Data-parallel ranks hold whole replicas (distributed_optimizer=False).",
        source=_SOURCE,
        buffers_gradients=True,
        keeps_whole_buffer=True,
    )
    if ranks == 1:
        return state._replace(cut="There is one data-parallel rank, so nothing is sharded further.")
    if not layout.distributed_optimizer:
        return state
    buckets = count_buckets(plan, stage, total)
    owned = _slice_buckets(start, elements, ceil_div(total, buckets), ranks)
    several = f" in each of {buckets} buckets" if buckets > 1 else ""
    return state._replace(
        gradients=owned,
        optimizer=owned,
        cut=f"Gradients lie in one buffer of all layers of the stage, the last layer first; each of {ranks} "
        f"ranks owns a range of it{several}, so that a layer's optimizer state may be on a few ranks only.",
    )


def _slice_buckets(start: int, elements: int, bucket: int, ranks: int) -> Slices:
    """Return the parts of a layer by rank, in the model's order: the buffer runs backward through it."""
    partition = ceil_div(bucket, ranks)
    slices: list[list[tuple[float, float]]] = [[] for _ in range(ranks)]
    for number in range(start // bucket, (start + elements - 1) // bucket + 1):
        first, last = max(start, number * bucket), min(start + elements, (number + 1) * bucket)
        within = slice_buffer([(first - number * bucket, last - first)], partition, ranks)
        for rank, parts in enumerate(within):
            for begin, end in parts:
                low = (first - start + begin * (last - first)) / elements
                high = (first - start + end * (last - first)) / elements
                slices[rank].append((1 - high, 1 - low))
    return tuple(join_intervals(parts) for parts in slices)
