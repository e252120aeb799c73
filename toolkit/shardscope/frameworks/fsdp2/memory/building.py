"""Host memory while FSDP2's ranks build the model: on the meta device if large, else whole in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.memory.overheads.building import (
    compute_fp32_model,
    compute_quantized_model,
    is_initialized_sharded,
)
from shardscope.memory.report import zero_term

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.report import Term


def compute_host_memory(plan: Plan) -> Term:
    """Return the host memory of one rank while it builds the model (``Fsdp2Engine.wrap``). Bytes.

    A quantized base is never built on meta: quantization needs the real weights, before they are sharded.
    """
    where = "on every rank, then sharded"
    if not is_initialized_sharded(plan):
        return compute_fp32_model(plan, plan.architecture.num_parameters, where)
    if plan.recipe.base_quantization is not None:
        return compute_quantized_model(plan, where)
    return zero_term("built on the meta device, and initialized shard by shard on the GPU")
