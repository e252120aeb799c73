"""Host memory while ZeRO's ranks build the model: the whole model, or the rank's share of a large one.

Source: ``deepspeed/runtime/engine.py`` (``_configure_distributed_model`` casts and moves a whole module) and
``deepspeed/runtime/zero/partition_parameters.py`` (``Init`` partitions tensors one by one). Pipeline stages
are parts of a transformers model (:mod:`shardscope.training.model.parts`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardscope.memory.overheads.building import in_fp32, is_drawn_in_parts
from shardscope.memory.report import no_bytes
from shardscope.memory.state.stages import shapes_of, stage_of

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.report import Term


def on_host(plan: Plan) -> Term:
    """Return one rank's host memory while it builds or loads the model (``DeepSpeedEngine.make``). Bytes."""
    layout: Any = plan.layout
    if is_drawn_in_parts(plan):
        if layout.stage == 3:
            return no_bytes("zero.Init cuts each tensor as it is drawn on the GPU, and keeps a shard of it")
        if layout.pp > 1:
            return in_fp32(plan, _most_on_a_stage(plan), "of its own stage, then moved")
    if layout.pp > 1:
        where = "on every rank, whose own stage is kept of it and moved"
        return in_fp32(plan, plan.architecture.num_parameters, where)
    where = "then cut by zero.Init" if layout.stage == 3 else "then moved by deepspeed.initialize"
    return in_fp32(plan, plan.architecture.num_parameters, f"on every rank, {where}")


def _most_on_a_stage(plan: Plan) -> int:
    shapes = shapes_of(plan.architecture, plan.stage_layers).kinds
    return max(stage_of(plan, shape).base for shape in shapes)
