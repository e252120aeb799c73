"""What each rank's tensors were at its peak, by component: the measured tier, rank by rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shardscope.memory.report import MemoryReport, Moment
from shardscope.runs.explain.measured import NOT_TENSORS, measured_memory, tensors_of


class RankMemory(NamedTuple):
    """One rank's tensors at the moment when there were most of them."""

    components: Mapping[str, int]
    """Bytes by component; ``other`` are bytes that nothing tells apart."""
    phase: str
    """Of a step: forward, backward, optimizer, ..."""

    @property
    def num_bytes(self) -> int:
        """All of them."""
        return sum(self.components.values())


def predicted_tensors_by_component(report: MemoryReport) -> RankMemory:
    """The same of a prediction: the moment of a step, its initialisation left out, with most tensors."""
    moments = (m for stage in report.by_stage for m in stage.moments if m.phase != "initialisation")
    return _tensors_at(max(moments, key=lambda each: tensors_of(each.components)))


def memory_by_rank(
    records: Mapping[int, Mapping[str, Any]], logged: Sequence[Mapping[str, Any]] = ()
) -> dict[int, RankMemory]:
    """By rank, from what ranks recorded (``run.what_it_was()``) and the peaks that they ``logged``.

    Libraries, the driver and the allocator's gaps are left out, as a prediction knows them as a band only.
    """
    peaks = {line["rank"]: line for line in logged}
    found = {}
    for rank in sorted({*records, *peaks}):
        beside = [peaks[rank]] if rank in peaks else []
        own = measured_memory(None, {rank: records.get(rank, {})}, beside)
        if not own.tensor_bytes:
            continue
        found[rank] = _tensors_at(max(own.worst_stage.moments, key=lambda each: tensors_of(each.components)))
    return found


def _tensors_at(moment: Moment) -> RankMemory:
    sizes = moment.components.items()
    return RankMemory({name: size for name, size in sizes if name not in NOT_TENSORS and size}, moment.phase)
