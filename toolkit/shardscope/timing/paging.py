"""What a paged optimizer's managed memory costs once the GPU has no room for all of it.

bitsandbytes keeps such moments in CUDA managed memory: pages stay on the GPU while there is room, and only
those that something else pushes out travel (Dettmers, bitsandbytes-foundation/bitsandbytes#962).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.report import MemoryReport


def paged_bytes(plan: Plan, report: MemoryReport) -> int:
    """Managed memory of the worst rank's optimizer, wherever its pages are; 0 for other optimizers."""
    if not plan.recipe.optimizer.startswith("paged"):
        return 0
    if plan.recipe.recompute == "offload":
        # The host then has activations too.
        recipe = replace(plan.recipe, recompute="none", recompute_interval=1)
        report = replace(plan, recipe=recipe).memory()
    return report.host_bytes


def evicted_bytes(plan: Plan, report: MemoryReport) -> int:
    """Pages on the host while the rest of the step is at its peak: the GPU has no room for them."""
    paged = paged_bytes(plan, report)
    return max(0, min(paged, report.peak_bytes + paged - report.usable_bytes))


def travelling_bytes(plan: Plan, report: MemoryReport) -> int:
    """Bytes that leave the GPU in one step, and come back in it.

    Where the update itself has room for all moments, only what the peak has pushed out comes back. Where it
    has not, every page travels: the driver evicts what was used longest ago (open-gpu-kernel-modules,
    ``uvm_pmm_gpu.c``), and updates go through moments in the same order each step, so that a page has always
    left before its turn comes.
    """
    evicted = evicted_bytes(plan, report)
    if not evicted:
        return 0
    paged = paged_bytes(plan, report)
    updating = sum(report.at("optimizer").values())
    return paged if updating + paged > report.usable_bytes else evicted
