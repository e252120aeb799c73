"""How DDP's ranks come by their model: each makes all of it in host memory, then moves it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.memory.overheads.building import in_fp32, is_drawn_in_parts, packed

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.report import Term


def on_host(plan: Plan) -> Term:
    """Host memory of one rank while it makes or loads the model (``DdpEngine.wrap``)."""
    where = "on every rank, then moved to its GPU"
    if plan.recipe.base_quantization is not None and is_drawn_in_parts(plan):
        return packed(plan, where)
    return in_fp32(plan, plan.architecture.num_parameters, where)
