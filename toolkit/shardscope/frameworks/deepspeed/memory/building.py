"""Host memory while ZeRO's ranks build the model: the whole model, or the rank's share of a large one.

Source: ``deepspeed/runtime/engine.py`` (``_configure_distributed_model`` casts and moves a whole module) and
``deepspeed/runtime/zero/partition_parameters.py`` (``Init`` partitions tensors one by one). Pipeline stages
are parts of a transformers model (:mod:`shardscope.training.model.pipeline_stages`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.frameworks.deepspeed.layout import get_layout
from shardscope.memory.overheads.building import compute_fp32_model, is_initialized_sharded
from shardscope.memory.report import zero_term
from shardscope.memory.state.stages import count_stage_weights, find_stage_shapes

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.report import Term


def compute_host_memory(plan: Plan) -> Term:
    """Return one rank's host memory while it builds or loads the model (``DeepSpeedEngine.make``). Bytes."""
    layout = get_layout(plan)
    if is_initialized_sharded(plan):
        if layout.stage == 3:
            return zero_term("zero.Init partitions each tensor when it is initialized on the GPU")
        if layout.pp > 1:
            return compute_fp32_model(plan, _count_largest_stage(plan), "of its own stage, then moved")
    if layout.pp > 1:
        where = "on every rank, which keeps its own stage and moves it"
        return compute_fp32_model(plan, plan.architecture.num_parameters, where)
    where = "then partitioned by zero.Init" if layout.stage == 3 else "then moved by deepspeed.initialize"
    return compute_fp32_model(plan, plan.architecture.num_parameters, f"on every rank, {where}")


def _count_largest_stage(plan: Plan) -> int:
    """Return the weights of the largest pipeline stage."""
    shapes = find_stage_shapes(plan.architecture, plan.stage_layers).kinds
    return max(count_stage_weights(plan, shape).base for shape in shapes)
