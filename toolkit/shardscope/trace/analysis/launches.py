"""Launch delays and queue lengths: whether the host is ahead of the GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict, get_type_hints

import numpy as np

from shardscope.trace.analysis.intervals import Int64s
from shardscope.trace.table import Table

if TYPE_CHECKING:
    from shardscope.trace.store import Trace


class LaunchRow(TypedDict):
    """Launches of the work of one GPU stream."""

    rank: int
    track: str
    num_launches: int
    """Kernels and copies whose launch was recorded."""
    median_delay_seconds: float
    """From the begin of the launch to that of the work. A few microseconds: the stream waits for the host."""
    max_delay_seconds: float
    mean_queue_length: float
    """Work that is launched and has not begun, averaged over time from the first launch to the last begin."""
    max_queue_length: int
    start_seconds: float
    """Launch of the work with the longest delay; not a column of the data frame."""


def find_launches(trace: Trace) -> Table[LaunchRow]:
    """Return one row per GPU stream; see :meth:`Trace.launches`."""
    activity = trace.activity
    work = np.flatnonzero(activity.is_gpu_work & (activity.launches >= 0))
    rows: list[LaunchRow] = []
    tracks = trace.track_index[work]
    for track in np.unique(tracks).tolist():
        stream_work = work[tracks == track]
        launched, begins = trace.start_ns[activity.launches[stream_work]], trace.start_ns[stream_work]
        # Clocks of host and GPU differ by a little: work cannot begin before its launch.
        begins = np.maximum(begins, launched)
        delays = begins - launched
        mean, longest = _measure_queue(launched, begins)
        rows.append(
            {
                "rank": trace.tracks[track].rank,
                "track": trace.tracks[track].name,
                "num_launches": len(stream_work),
                "median_delay_seconds": float(np.median(delays)) / 1e9,
                "max_delay_seconds": int(delays.max()) / 1e9,
                "mean_queue_length": mean,
                "max_queue_length": longest,
                "start_seconds": int(launched[int(np.argmax(delays))]) / 1e9,
            }
        )
    columns = tuple(name for name in get_type_hints(LaunchRow) if name != "start_seconds")
    return Table(rows, columns, "the trace has no GPU work whose launch was recorded")


def _measure_queue(launched: Int64s, begins: Int64s) -> tuple[float, int]:
    """Return the mean and the largest number of launched slices that have not begun."""
    # Every launch adds one to the queue and every begin takes one away; on ties the begin comes first.
    times = np.concatenate((begins, launched))
    changes = np.concatenate((np.full(len(begins), -1), np.full(len(launched), 1)))
    order = np.lexsort((changes, times))
    # Work that begins at its launch is never queued: both changes are at one time.
    length = np.cumsum(changes[order])
    span = int(begins.max() - launched.min())
    mean = float((begins - launched).sum()) / span if span else 0.0
    return mean, max(int(length.max()), 0)
