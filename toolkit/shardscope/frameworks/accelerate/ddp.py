"""DDP for a user's script: Accelerate's default, without a plugin."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardscope.core.number_format import count
from shardscope.frameworks.accelerate.plugins import contradicts

if TYPE_CHECKING:
    from shardscope.core.plan import Plan


def check_installed(plan: Plan) -> None:
    """Check nothing: the engine's own requirements suffice."""


def distributed_types(plan: Plan) -> tuple[str, ...]:
    """Return the distributed types for the device; one rank may also run without distribution."""
    kind = "MULTI_GPU" if plan.on_gpu else "MULTI_CPU"
    return (kind, "NO") if plan.world_size == 1 else (kind,)


def environment(plan: Plan, folder: Path) -> dict[str, str]:
    """Return no variables: without a plugin Accelerate uses DDP."""
    return {}


def told(plan: Plan, accelerator: Any) -> None:
    """Configure nothing."""


def read_back(plan: Plan, accelerator: Any, model: Any) -> dict[str, Any]:
    """Check and describe the DDP wrapper and its ranks; a single rank may have no wrapper."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    kind = type(model).__name__
    if not isinstance(model, DistributedDataParallel):
        if plan.world_size > 1:
            raise contradicts("DDP", kind, "hand the model to accelerator.prepare")
        return {"module": kind, "data_parallel": 1, "words": f"one rank, {kind} without a wrapper"}
    num_ranks = dist.get_world_size(model.process_group)
    if num_ranks != plan.world_size:
        raise contradicts(f"DDP over {plan.world_size} ranks", f"DDP over {num_ranks}")
    return {
        "module": kind,
        "data_parallel": num_ranks,
        "bucket_cap_bytes": int(model.bucket_bytes_cap),
        "gradient_as_bucket_view": bool(model.gradient_as_bucket_view),
        "words": f"DDP: {kind} over {count(num_ranks, 'rank')}",
    }
