"""What each rank's tensors were at its peak, by component: the measured tier, rank by rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shardscope.runs.measured import NOT_TENSORS, measured_memory, tensors_of


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
        moment = max(own.worst_stage.moments, key=lambda each: tensors_of(each.components))
        tensors = {name: size for name, size in moment.components.items() if name not in NOT_TENSORS and size}
        found[rank] = RankMemory(tensors, moment.phase)
    return found
