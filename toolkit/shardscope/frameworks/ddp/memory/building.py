"""Host memory while DDP's ranks build the model: each builds all of it, then moves it to its GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.memory.overheads.building import (
    compute_fp32_model,
    compute_quantized_model,
    is_initialized_sharded,
)

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.report import Term


def compute_host_memory(plan: Plan) -> Term:
    """Return the host memory of one rank while it builds or loads the model (``DdpEngine.wrap``). Bytes."""
    where = "on every rank, then moved to its GPU"
    if plan.recipe.base_quantization is not None and is_initialized_sharded(plan):
        return compute_quantized_model(plan, where)
    return compute_fp32_model(plan, plan.architecture.num_parameters, where)
