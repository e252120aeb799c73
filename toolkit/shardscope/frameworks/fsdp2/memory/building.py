"""Host memory while FSDP2's ranks build the model: on the meta device if large, else whole in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.memory.overheads.building import in_fp32, is_drawn_in_parts, packed
from shardscope.memory.report import no_bytes

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.report import Term


def on_host(plan: Plan) -> Term:
    """Return the host memory of one rank while it builds the model (``Fsdp2Engine.wrap``). Bytes.

    A quantized base is never built on meta: quantization needs the real weights, before they are sharded.
    """
    where = "on every rank, then sharded"
    if not is_drawn_in_parts(plan):
        return in_fp32(plan, plan.architecture.num_parameters, where)
    if plan.recipe.base_quantization is not None:
        return packed(plan, where)
    return no_bytes("built on the meta device, and drawn shard by shard on the GPU")
