"""Measured tensor bytes of each rank at its peak, by component."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from shardscope.memory.overheads.band import NOT_TENSORS
from shardscope.memory.report import MemoryReport, PhaseMemory
from shardscope.runs.explain.measured import build_measured_memory, sum_tensor_bytes

if TYPE_CHECKING:
    from shardscope.runs.watch.logged_memory import LoggedPeak


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
    phases = (phase for stage in report.by_stage for phase in stage.phases if phase.phase != "initialisation")
    return _sum_phase(max(phases, key=lambda phase: sum_tensor_bytes(phase.components)))


def read_rank_memory(
    records: Mapping[int, Mapping[str, object]], logged: Sequence[LoggedPeak] = ()
) -> dict[int, RankMemory]:
    """Return the tensor bytes of each rank, from ``run.engine_reports()`` and the ``logged`` peaks.

    Libraries, driver and allocator fragmentation are left out: a prediction has only a band for them.
    """
    peaks = {line["rank"]: line for line in logged}
    memory = {}
    for rank in sorted({*records, *peaks}):
        # Without a plan there is one stage, so this rank alone is the worst one.
        logged_peaks = [peaks[rank]] if rank in peaks else []
        measured = build_measured_memory(None, {rank: records.get(rank, {})}, logged_peaks)
        if not measured.tensor_bytes:
            continue
        memory[rank] = _sum_phase(
            max(measured.worst_stage.phases, key=lambda phase: sum_tensor_bytes(phase.components))
        )
    return memory


def _sum_phase(phase: PhaseMemory) -> RankMemory:
    sizes = phase.components.items()
    return RankMemory({name: size for name, size in sizes if name not in NOT_TENSORS and size}, phase.phase)
