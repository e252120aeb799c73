"""DDP's placement of one layer: a replica on every rank (Li et al. 2020, section 3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.memory.state.layer_sharding import StateSharding, replicate

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.state.stages import Stage


def list_chunk_layers(plan: Plan) -> list[int]:
    """Return the layers of each model chunk: DDP has one."""
    return list(plan.stage_layers)


def shard_layer(plan: Plan, stage: Stage, layer: int) -> StateSharding:
    """Return where the state of a layer of ``stage`` is."""
    whole = replicate(plan.world_size)
    return StateSharding(
        parameters=whole,
        gradients=whole,
        optimizer=whole,
        cut="Nothing is sharded: every rank has a replica of the layer and of its whole training state.",
        source="Li et al. 2020, section 3; torch.nn.parallel.DistributedDataParallel",
        buffers_gradients=True,
        keeps_whole_buffer=True,
    )
