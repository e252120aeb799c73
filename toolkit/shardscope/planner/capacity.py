"""Whether what a plan needs is there: on its cards, in its nodes' host memory, on their NVMe.

One answer for the sentence, the repairs and the launch. ``MemoryReport.fits`` is about the card alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from shardscope.frameworks.registry import frameworks
from shardscope.timing.paging import evicted_bytes, paged_bytes

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.report import MemoryReport


class Place(NamedTuple):
    """One kind of memory that a plan needs."""

    name: Literal["GPU memory", "host memory", "NVMe", "host memory while the model is made"]
    needed_bytes: int
    """On the worst rank's card; of host memory and NVMe, on the node that needs most."""
    room_bytes: int | None
    """What there is of it; None: not known."""
    rank_bytes: int
    """What the rank needs that needs most."""

    @property
    def short_bytes(self) -> int:
        """By how much it is too little; 0 where it is enough or not known."""
        return 0 if self.room_bytes is None else max(0, self.needed_bytes - self.room_bytes)


def places(plan: Plan, report: MemoryReport) -> tuple[Place, ...]:
    """The card, and whatever else the plan needs some of."""
    card = Place("GPU memory", report.peak_bytes, report.usable_bytes, report.peak_bytes)
    return (card, *beside_the_card(plan, report), *_making(plan))


def _making(plan: Plan) -> tuple[Place, ...]:
    """Host memory before the first step: all ranks of a node make, or load, the model at the same time."""
    each = frameworks[plan.layout.framework].building_model().on_host(plan).num_bytes
    if not each:
        return ()
    on_a_node = each * plan.cluster.gpus_per_node
    room = plan.cluster.host_memory_bytes
    return (Place("host memory while the model is made", on_a_node, room, each),)


def beside_the_card(plan: Plan, report: MemoryReport) -> tuple[Place, ...]:
    """Host memory and NVMe, as far as the plan moves anything there.

    Of a paged optimizer only those pages count that the GPU has no room for.
    """
    cluster = plan.cluster
    stays = paged_bytes(plan, report) - evicted_bytes(plan, report)
    host = [max(0, stage.host_bytes - stays) for stage in report.by_stage]
    if cluster.gpu.memory_is_shared and any(host):
        # CPU ranks themselves are in the host's memory.
        host = [num_bytes + report.peak_bytes for num_bytes in host]
    drives = [stage.nvme_bytes for stage in report.by_stage]
    found = (
        Place("host memory", _on_a_node(plan, host), cluster.host_memory_bytes, max(host)),
        Place("NVMe", _on_a_node(plan, drives), cluster.nvme_bytes, max(drives)),
    )
    return tuple(place for place in found if place.rank_bytes)


def shortages(plan: Plan, report: MemoryReport) -> list[Place]:
    """Where there is too little, the card first; empty: the plan fits, as far as sizes are known."""
    return [place for place in places(plan, report) if place.short_bytes]


def fits(plan: Plan, report: MemoryReport) -> bool:
    """Whether everything has room that is known."""
    return not shortages(plan, report)


def _on_a_node(plan: Plan, by_stage: list[int]) -> int:
    """Bytes on the fullest node. Pipeline stages are the outermost degree: a node has neighbours."""
    per_node, per_stage = plan.cluster.gpus_per_node, plan.world_size // len(by_stage)
    if not any(by_stage) or per_stage % per_node == 0:
        return max(by_stage) * per_node
    by_rank = [num_bytes for num_bytes in by_stage for _ in range(per_stage)]
    return max(sum(by_rank[first : first + per_node]) for first in range(0, plan.world_size, per_node))
