"""Marks: the recorded events that are not slices: ends of flows, samples of counters, instants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shardscope.trace.argument_blocks import EventArguments
from shardscope.trace.loading.chunks import FLOW_END, FLOW_START, FLOW_STEP, Key

if TYPE_CHECKING:
    from shardscope.trace.store import Trace

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Marks:
    """Columns with one entry per mark, of each rank by time; ranks one after the other."""

    phase: npt.NDArray[np.int16]
    """A number of ``loading/chunks.py``, such as ``FLOW_START`` or ``COUNTER``."""
    time_ns: Int64s
    """On the trace's clock; before 0 for what happened before the first slice."""
    name_index: npt.NDArray[np.int32]
    category_index: npt.NDArray[np.int32]
    rank_position: npt.NDArray[np.int32]
    """Position in ``trace.ranks``."""
    track_index: npt.NDArray[np.int32]
    """Track of the mark's thread or stream; -1 if no slice is on it."""
    key_index: npt.NDArray[np.int32]
    """Index into ``keys``: counters belong to a process that may have no slices."""
    id: Int64s
    """Id that the two ends of a flow have in common; -1 without one."""
    arguments: EventArguments
    keys: list[Key]
    """Process and thread, as the profiler wrote them."""

    def __len__(self) -> int:
        return len(self.phase)

    def select(self, *phases: int) -> Int64s:
        """Return the indices of marks of these phases."""
        return np.flatnonzero(np.isin(self.phase, phases))


def find_flows(marks: Marks) -> tuple[Int64s, Int64s]:
    """Return the marks where arrows start and end: one arrow from each end of a flow to the next in time.

    Ends match by rank, category and id, as Chrome matches them.
    """
    ends = marks.select(FLOW_START, FLOW_STEP, FLOW_END)
    columns = (marks.rank_position[ends], marks.category_index[ends], marks.id[ends])
    # On ties of time a start comes before an end: FLOW_START is the smallest phase.
    order = np.lexsort((marks.phase[ends], marks.time_ns[ends], *reversed(columns)))
    ends = ends[order]
    same = np.ones(max(len(ends) - 1, 0), dtype=bool)
    for column in columns:
        same &= column[order][1:] == column[order][:-1]
    # An end that another flow of the same id follows has no arrow to it.
    same &= (marks.phase[ends[:-1]] != FLOW_END) & (marks.phase[ends[1:]] != FLOW_START)
    return ends[:-1][same], ends[1:][same]


def find_slices_at(trace: Trace, track_index: npt.NDArray[np.int32], time_ns: Int64s) -> Int64s:
    """Return the innermost slice of a track at a time, for each pair of both; -1 if there is none.

    The start of a slice is in it, and so is its end, which flows of launches may have.
    """
    innermost = np.full(len(track_index), -1, np.int64)
    if not len(trace):
        return innermost
    row = trace.first_row_of_track[:-1][trace.track_index] + trace.depth
    bounds = np.searchsorted(row, np.arange(int(trace.first_row_of_track[-1]) + 1))
    end_ns = trace.end_ns
    for track in np.unique(track_index[track_index >= 0]).tolist():
        positions = np.flatnonzero(track_index == track)
        times = time_ns[positions]
        first_row, last_row = trace.first_row_of_track[track : track + 2].tolist()
        # From the outermost row to the innermost one, which is kept.
        for first, end in zip(
            bounds[first_row:last_row].tolist(), bounds[first_row + 1 : last_row + 1].tolist(), strict=True
        ):
            slices = first + np.searchsorted(trace.start_ns[first:end], times, side="right") - 1
            inside = (slices >= first) & (end_ns[np.maximum(slices, 0)] >= times)
            innermost[positions[inside]] = slices[inside]
    return innermost
