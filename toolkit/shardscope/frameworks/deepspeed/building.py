"""How ZeRO's ranks come by their model: whole on each; stage 3 cuts every tensor as it is made.

Read off ``deepspeed/runtime/engine.py`` (``_configure_distributed_model`` casts and moves a whole module) and
``deepspeed/runtime/zero/partition_parameters.py`` (``Init`` makes a module's tensors on the device). The
stages of a pipeline are cut from a whole model here (:mod:`shardscope.training.model_parts`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardscope.memory.building import in_fp32
from shardscope.memory.report import no_bytes

if TYPE_CHECKING:
    from shardscope.memory.report import Term
    from shardscope.plan import Plan


def on_host(plan: Plan) -> Term:
    """Host memory of one rank while it makes or loads the model; ``deepspeed.zero.Init`` with stage 3."""
    layout: Any = plan.layout
    if layout.stage == 3:
        return no_bytes("deepspeed.zero.Init makes each tensor on the GPU and keeps a shard of it")
    if layout.pp > 1:
        where = "on every rank, whose own stage is kept of it and moved"
        return in_fp32(plan, plan.architecture.num_parameters, where)
    where = "on every rank, then moved by deepspeed.initialize"
    return in_fp32(plan, plan.architecture.num_parameters, where)
