"""Traffic of a paged optimizer's managed memory if it does not fit on the GPU.

bitsandbytes keeps such moments in CUDA managed memory: pages stay on the GPU while there is room, and only
evicted pages are transferred (Dettmers, bitsandbytes-foundation/bitsandbytes#962).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.report import MemoryReport


def count_paged_bytes(plan: Plan, report: MemoryReport) -> int:
    """Return bytes of the worst rank's paged optimizer state, on GPU or host; 0 for other optimizers."""
    if not plan.recipe.optimizer.startswith("paged"):
        return 0
    if plan.recipe.recompute == "offload":
        # Then the report's host bytes include activations too.
        recipe = replace(plan.recipe, recompute="none", recompute_interval=1)
        report = replace(plan, recipe=recipe).memory()
    return report.host_bytes


def count_evicted_bytes(plan: Plan, report: MemoryReport) -> int:
    """Return bytes of pages that do not fit on the GPU at the step's peak, and so are on the host."""
    paged = count_paged_bytes(plan, report)
    return max(0, min(paged, report.peak_bytes + paged - report.usable_bytes))


def count_page_transfer_bytes(plan: Plan, report: MemoryReport) -> int:
    """Return bytes that leave the GPU in one step, and return in it.

    If all moments fit during the update, only the pages evicted at the peak return. Otherwise every page is
    transferred: the driver evicts the least recently used (open-gpu-kernel-modules, ``uvm_pmm_gpu.c``), and
    updates read moments in the same order each step, so a page has always been evicted before its use.
    """
    evicted = count_evicted_bytes(plan, report)
    if not evicted:
        return 0
    paged = count_paged_bytes(plan, report)
    updating = sum(report.at("optimizer").values())
    return paged if updating + paged > report.usable_bytes else evicted
