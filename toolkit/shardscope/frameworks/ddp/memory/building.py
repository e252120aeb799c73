"""Host memory while DDP's ranks build the model: each builds all of it, then moves it to its GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.memory.overheads.building import in_fp32, is_drawn_in_parts, packed

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.report import Term


def on_host(plan: Plan) -> Term:
    """Return the host memory of one rank while it builds or loads the model (``DdpEngine.wrap``). Bytes."""
    where = "on every rank, then moved to its GPU"
    if plan.recipe.base_quantization is not None and is_drawn_in_parts(plan):
        return packed(plan, where)
    return in_fp32(plan, plan.architecture.num_parameters, where)
