"""Host memory of model building in Megatron-core: none, each rank initializes its shard on its GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.memory.report import no_bytes

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.report import Term


def on_host(plan: Plan) -> Term:
    """Return no bytes: ``use_cpu_initialization`` is off (megatron/core/model_parallel_config.py)."""
    return no_bytes("each rank makes its own part on its GPU (use_cpu_initialization=False)")
