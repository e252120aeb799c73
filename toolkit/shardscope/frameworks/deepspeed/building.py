"""How ZeRO's ranks come by their model: whole on each; stage 3 cuts every tensor as it is made.

Read off ``deepspeed/runtime/engine.py`` (``_configure_distributed_model`` casts and moves a whole module),
``deepspeed/runtime/zero/partition_parameters.py`` (``Init`` makes a module's tensors on the device) and
``deepspeed/runtime/pipe/module.py`` (``_build`` makes the layers of the rank's own stage).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardscope.frameworks.deepspeed import memory
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
        most = max(memory.stage(plan, kind).base for kind in memory.shapes(plan).kinds)
        return in_fp32(plan, most, "on every rank, its own stage, then moved")
    where = "on every rank, then moved by deepspeed.initialize"
    return in_fp32(plan, plan.architecture.num_parameters, where)
