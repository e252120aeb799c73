"""Host memory of model building in Megatron-core: none, each rank initializes its shard on its GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.memory.report import zero_term

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.report import Term


def compute_host_memory(plan: Plan) -> Term:
    """Return no bytes: ``use_cpu_initialization`` is off (megatron/core/model_parallel_config.py)."""
    return zero_term("each rank initializes its shard on its GPU (use_cpu_initialization=False)")
