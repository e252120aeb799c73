"""Measured tensor bytes of each rank at its peak, by component."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shardscope.memory.report import MemoryReport, PhaseMemory
from shardscope.runs.explain.measured import NOT_TENSORS, build_measured_memory, sum_tensor_bytes


class RankMemory(NamedTuple):
    """Tensor bytes of one rank in its peak phase."""

    components: Mapping[str, int]
    """Bytes by component; ``other`` are bytes that could not be attributed."""
    phase: str
    """Phase of the step: forward, backward, optimizer, ..."""

    @property
    def num_bytes(self) -> int:
        """Sum over components."""
        return sum(self.components.values())


def predict_rank_memory(report: MemoryReport) -> RankMemory:
    """Return the predicted tensor bytes in the peak phase of a step, initialization excluded."""
    moments = (m for stage in report.by_stage for m in stage.moments if m.phase != "initialisation")
    return _tensors_at(max(moments, key=lambda each: sum_tensor_bytes(each.components)))


def read_rank_memory(
    records: Mapping[int, Mapping[str, Any]], logged: Sequence[Mapping[str, Any]] = ()
) -> dict[int, RankMemory]:
    """Return the tensor bytes of each rank, from ``run.what_it_was()`` and the ``logged`` peaks.

    Libraries, driver and allocator fragmentation are left out: a prediction has only a band for them.
    """
    peaks = {line["rank"]: line for line in logged}
    found = {}
    for rank in sorted({*records, *peaks}):
        beside = [peaks[rank]] if rank in peaks else []
        own = build_measured_memory(None, {rank: records.get(rank, {})}, beside)
        if not own.tensor_bytes:
            continue
        found[rank] = _tensors_at(
            max(own.worst_stage.moments, key=lambda each: sum_tensor_bytes(each.components))
        )
    return found


def _tensors_at(moment: PhaseMemory) -> RankMemory:
    sizes = moment.components.items()
    return RankMemory({name: size for name, size in sizes if name not in NOT_TENSORS and size}, moment.phase)
