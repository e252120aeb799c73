"""FSDP2's placement of one layer: rows of every tensor, all-gathered before its forward and backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.core.layout import split_layers_evenly
from shardscope.frameworks.fsdp2.layout import get_layout
from shardscope.memory.state.layer_sharding import StateSharding, replicate, slice_evenly

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.state.stages import Stage


def list_chunk_layers(plan: Plan) -> list[int]:
    """Return the layers of each model chunk in the model's order: chunk c of stage s is number c x pp + s."""
    degrees = plan.degrees
    return split_layers_evenly(plan.architecture.num_hidden_layers, degrees.pp * degrees.vpp)


def shard_layer(plan: Plan, stage: Stage, layer: int) -> StateSharding:
    """Return where the state of a layer of ``stage`` is.

    A replica of HSDP is ``shard`` times ``cp`` ranks, and replicas follow one another in rank order.
    """
    degrees, reshard = plan.degrees, get_layout(plan).reshard_after_forward
    ranks, parts = degrees.data_parallel * degrees.cp, degrees.shard * degrees.cp
    slices = slice_evenly(ranks, parts)
    after_forward = None
    if reshard is False:
        after_forward = replicate(ranks)
    elif reshard is not True:
        after_forward = slice_evenly(ranks, int(reshard))
    replicas = (
        f" Each of the {degrees.replicate} replicas holds all parts (HSDP): reduced gradients are "
        "all-reduced between them."
        if degrees.replicate > 1
        else ""
    )
    return StateSharding(
        parameters=slices,
        gradients=slices,
        optimizer=slices,
        cut=f"fully_shard cuts every tensor of the layer along its first dimension into {parts} parts."
        + replicas,
        source="Zhao et al. 2023; torch.distributed.fsdp.fully_shard",
        gathers_for_passes=True,
        after_forward=after_forward,
    )
