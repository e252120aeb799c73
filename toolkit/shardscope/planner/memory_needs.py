"""Required and available memory of a plan: GPU memory, host memory and NVMe of a node.

The verdict, the suggested fixes and the launch use the same numbers. ``MemoryReport.fits`` covers GPU memory
only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from shardscope.frameworks.registry import frameworks
from shardscope.memory.overheads.libraries import TIGHT_PERCENT
from shardscope.timing.paging import count_evicted_bytes, count_paged_bytes

if TYPE_CHECKING:
    from shardscope.core.cluster import Cluster
    from shardscope.core.plan import Plan
    from shardscope.memory.report import MemoryReport


WHILE_BUILT: Final = "host memory while the model is built"
"""Name of the host memory that ranks need before the first step."""


class MemoryNeed(NamedTuple):
    """Required and available bytes of one kind of memory."""

    name: Literal["GPU memory", "host memory", "NVMe", "host memory while the model is built"]
    needed_bytes: int
    """GPU memory: bytes on the worst rank. Host memory and NVMe: bytes on the node that needs most."""
    room_bytes: int | None
    """Available bytes; None if not known."""
    rank_bytes: int
    """Bytes on the rank that needs most."""

    @property
    def short_bytes(self) -> int:
        """Return the missing bytes; 0 if there are enough or if the size is not known."""
        return 0 if self.room_bytes is None else max(0, self.needed_bytes - self.room_bytes)


def list_memory_needs(plan: Plan, report: MemoryReport) -> tuple[MemoryNeed, ...]:
    """Return the GPU memory and every other kind of memory that the plan needs."""
    gpu_memory = MemoryNeed("GPU memory", report.peak_bytes, report.usable_bytes, report.peak_bytes)
    return (gpu_memory, *list_host_and_nvme_needs(plan, report), *_list_building_memory(plan))


def _list_building_memory(plan: Plan) -> tuple[MemoryNeed, ...]:
    """Return the host memory needed before the first step, when all ranks of a node build or load the
    model."""
    # Every rank of a node builds or loads its model at the same time, so their needs add up.
    rank_bytes = frameworks[plan.layout.framework].building_model().compute_host_memory(plan).num_bytes
    if not rank_bytes:
        return ()
    on_a_node = rank_bytes * plan.cluster.gpus_per_node
    room = plan.cluster.host_memory_bytes
    return (MemoryNeed(WHILE_BUILT, on_a_node, room, rank_bytes),)


def list_host_and_nvme_needs(plan: Plan, report: MemoryReport) -> tuple[MemoryNeed, ...]:
    """Return the host memory and NVMe that the plan needs in a step; empty if it needs none.

    Of a paged optimizer, only the pages that are evicted from the GPU count.
    """
    cluster = plan.cluster
    # bitsandbytes' paged optimizers use managed memory: pages stay on the GPU until it is full. Reports count
    # all of them as host memory.
    stays = count_paged_bytes(plan, report) - count_evicted_bytes(plan, report)
    host = [max(0, stage.host_bytes - stays) for stage in report.by_stage]
    if cluster.gpu.memory_is_shared and any(host):
        # The memory of CPU ranks is host memory.
        host = [num_bytes + report.peak_bytes for num_bytes in host]
    drives = [stage.nvme_bytes for stage in report.by_stage]
    needs = (
        MemoryNeed("host memory", _on_a_node(plan, host), cluster.host_memory_bytes, max(host)),
        MemoryNeed("NVMe", _on_a_node(plan, drives), cluster.nvme_bytes, max(drives)),
    )
    return tuple(need for need in needs if need.rank_bytes)


def find_shortages(plan: Plan, report: MemoryReport) -> list[MemoryNeed]:
    """Return the kinds of memory that are too small, the GPU first; empty if the plan fits, as far as sizes
    are known."""
    return [need for need in list_memory_needs(plan, report) if need.short_bytes]


def fits(plan: Plan, report: MemoryReport) -> bool:
    """Return whether every kind of memory of known size is large enough."""
    return not find_shortages(plan, report)


def compute_loose_headroom(cluster: Cluster) -> int:
    """Return the bytes of each GPU that a plan leaves free that is not tight."""
    # A search counts free bytes, the verdict a share.
    usable = cluster.usable_bytes_per_gpu
    return usable - usable * TIGHT_PERCENT // 100


def relies_on_unknown_memory(plan: Plan, report: MemoryReport, than: Plan, than_report: MemoryReport) -> bool:
    """Return whether ``plan`` needs more memory than the plan ``than`` of a kind whose size is not known."""
    needed = {need.name: need.needed_bytes for need in list_memory_needs(than, than_report)}
    return any(
        need.room_bytes is None and need.needed_bytes > needed.get(need.name, 0)
        for need in list_memory_needs(plan, report)
    )


def _on_a_node(plan: Plan, by_stage: list[int]) -> int:
    """Return the bytes on the fullest node. Pipeline stages are the outermost degree, so that consecutive
    ranks share a node."""
    per_node, per_stage = plan.cluster.gpus_per_node, plan.world_size // len(by_stage)
    # Whole stages fill whole nodes: the node of the largest stage needs the most.
    if not any(by_stage) or per_stage % per_node == 0:
        return max(by_stage) * per_node
    # Otherwise a node has ranks of several stages, and the fullest one is found by adding up each node.
    by_rank = [num_bytes for num_bytes in by_stage for _ in range(per_stage)]
    return max(sum(by_rank[first : first + per_node]) for first in range(0, plan.world_size, per_node))
