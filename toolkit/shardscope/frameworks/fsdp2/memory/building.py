"""How FSDP2's ranks come by their model: a large one on the meta device, others whole in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.memory.overheads.building import in_fp32, is_drawn_in_parts, packed
from shardscope.memory.report import no_bytes

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.report import Term


def on_host(plan: Plan) -> Term:
    """Host memory of one rank while it makes the model (``Fsdp2Engine.wrap``).

    What is quantised is quantised from numbers, so such a base is there before it is sharded.
    """
    where = "on every rank, then sharded"
    if not is_drawn_in_parts(plan):
        return in_fp32(plan, plan.architecture.num_parameters, where)
    if plan.recipe.base_quantization is not None:
        return packed(plan, where)
    return no_bytes("built on the meta device, and drawn shard by shard on the GPU")
