"""Counters and instants of a trace for display: lines and ticks at the resolution of the screen."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from shardscope.trace.analysis.memory import read_devices
from shardscope.trace.loading.chunks import ASYNC_INSTANT, COUNTER, INSTANT
from shardscope.trace.store import Trace
from shardscope.trace.tiles import Column

COUNTER_COLUMNS = (("first", "<u4"), ("time", "<f8"), ("value", "<f8"))
"""Name and type of each buffer of counters: where each counter begins, and its samples."""
INSTANT_COLUMNS = (("time", "<f8"), ("row", "<u4"), ("name", "<u4"), ("count", "<u4"))
"""Name and type of each buffer of instants; ``row`` is the first one of the track."""

MAX_COUNTERS_PER_RANK = 12
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Counter:
    """Samples of one counter by time. Each value holds until the next."""

    rank: int
    name: str
    """"cuda:0 allocated", or the counter's own name."""
    is_bytes: bool
    time_ns: Int64s
    value: npt.NDArray[np.float64]

    def count_samples(self, t0_ns: float, t1_ns: float, width: int) -> int:
        """Return the maximum number of samples that :meth:`cut` returns."""
        first, last = self._find_range(t0_ns, t1_ns)
        return min(last - first, 2 * width)

    def _find_range(self, t0_ns: float, t1_ns: float) -> tuple[int, int]:
        first = max(int(np.searchsorted(self.time_ns, t0_ns, side="right")) - 1, 0)
        return first, int(np.searchsorted(self.time_ns, t1_ns, side="right"))

    def cut(self, t0_ns: float, t1_ns: float, width: int) -> tuple[Int64s, npt.NDArray[np.float64]]:
        """Return times and values between two times and just before: per pixel the highest and the last."""
        first, last = self._find_range(t0_ns, t1_ns)
        time, value = self.time_ns[first:last], self.value[first:last]
        if len(time) <= 2 * width:
            return time, value
        pixel = np.floor((time - t0_ns) / ((t1_ns - t0_ns) / width)).astype(np.int64)
        begins = np.flatnonzero(np.concatenate(([True], pixel[1:] != pixel[:-1])))
        ends = np.append(begins[1:], len(pixel)) - 1
        highest = np.lexsort((-value, pixel))[begins]
        selected = np.union1d(highest, ends)
        return time[selected], value[selected]


class MarkTiler:
    """Creator of the counters' and instants' columns of one trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.counters = find_counters(trace)
        """Counters in the order of ranks, up to :data:`MAX_COUNTERS_PER_RANK` each."""
        marks = trace.marks
        instants = marks.select(INSTANT, ASYNC_INSTANT)
        is_memory = np.array([name == "[memory]" for name in trace.names], dtype=bool)
        if len(instants):
            instants = instants[~is_memory[marks.name_index[instants]]]
        track = marks.track_index[instants].astype(np.int64)
        # Instants of a thread without slices are on the rank's first track.
        first_track = {one.rank: i for i, one in reversed(list(enumerate(trace.tracks)))}
        of_rank = np.array([first_track.get(rank, -1) for rank in trace.ranks] or [-1], np.int64)
        track = np.where(track >= 0, track, of_rank[marks.rank_position[instants]])
        instants, track = instants[track >= 0], track[track >= 0]
        self._row = trace.first_row_of_track[:-1][track] if len(track) else track
        self._time = marks.time_ns[instants]
        self._name = marks.name_index[instants]
        order = np.lexsort((self._time, self._row))
        self._row, self._time, self._name = self._row[order], self._time[order], self._name[order]

    def cut_counters(
        self, t0_ns: float, t1_ns: float, width: int, numbers: Sequence[int] | None = None
    ) -> dict[str, Column]:
        """Return the columns of :data:`COUNTER_COLUMNS` between two times, of all or of some counters."""
        chosen = self.counters if numbers is None else [self.counters[number] for number in numbers]
        pieces = [counter.cut(t0_ns, t1_ns, width) for counter in chosen]
        counts = [len(time) for time, _ in pieces]
        return {
            "first": np.concatenate(([0], np.cumsum(counts, dtype=np.int64))),
            "time": np.concatenate([time for time, _ in pieces]) if pieces else np.zeros(0),
            "value": np.concatenate([value for _, value in pieces]) if pieces else np.zeros(0),
        }

    def cut_instants(
        self, t0_ns: float, t1_ns: float, width: int, rows: Sequence[int] | None = None
    ) -> dict[str, Column]:
        """Return the columns of :data:`INSTANT_COLUMNS` between two times; those in one pixel are merged.

        ``rows``: the rows to include; None: all.
        """
        is_visible = (self._time >= t0_ns) & (self._time <= t1_ns)
        if rows is not None:
            is_visible &= np.isin(self._row, rows)
        visible = np.flatnonzero(is_visible)
        time, row = self._time[visible], self._row[visible]
        pixel = np.floor((time - t0_ns) / ((t1_ns - t0_ns) / width)).astype(np.int64)
        is_first = np.ones(len(visible), dtype=bool)
        is_first[1:] = (pixel[1:] != pixel[:-1]) | (row[1:] != row[:-1])
        first = np.flatnonzero(is_first)
        return {
            "time": time[first],
            "row": row[first],
            "name": self._name[visible][first],
            "count": np.diff(first, append=len(visible)),
        }


def find_counters(trace: Trace) -> list[Counter]:
    """Return memory by device, from the allocator's records, and all counters, rank by rank."""
    counters: dict[int, list[Counter]] = defaultdict(list)
    for samples in trace.memory_samples:
        for device in read_devices(samples):
            series = [("allocated", device.allocated_bytes)]
            if device.reserved_bytes is not None:
                series.append(("reserved", device.reserved_bytes))
            counters[samples.rank] += [
                Counter(
                    rank=samples.rank,
                    name=f"{device.name} {what}",
                    is_bytes=True,
                    time_ns=device.time_ns,
                    value=values,
                )
                for what, values in series
            ]
    for counter in _read_counter_events(trace):
        counters[counter.rank].append(counter)
    return [counter for rank in trace.ranks for counter in counters[rank][:MAX_COUNTERS_PER_RANK]]


def _read_counter_events(trace: Trace) -> list[Counter]:
    """Return the series of the counter events: one for each name, process and key with numbers."""
    marks = trace.marks
    events = marks.select(COUNTER)
    series: dict[tuple[int, int, int, str], list[tuple[int, float]]] = defaultdict(list)
    decoder = msgspec.json.Decoder(dict[str, object])
    for position, text in marks.arguments.iterate(events):
        event = events[position]
        try:
            values = decoder.decode(text)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
        owner = (int(marks.rank_position[event]), int(marks.name_index[event]), int(marks.key_index[event]))
        for key, value in values.items():
            if isinstance(value, int | float) and not isinstance(value, bool) and np.isfinite(value):
                series[(*owner, key)].append((int(marks.time_ns[event]), float(value)))
    counters = []
    for (rank, name, key_index, key), samples in sorted(series.items()):
        siblings = {one[3] for one in series if one[:3] == (rank, name, key_index)}
        title = trace.names[name]
        samples.sort()
        counters.append(
            Counter(
                rank=trace.ranks[rank],
                name=f"{title} {key}" if len(siblings) > 1 else title,
                is_bytes="byte" in f"{title} {key}".lower() or "memory" in title.lower(),
                time_ns=np.array([time for time, _ in samples], np.int64),
                value=np.array([value for _, value in samples], np.float64),
            )
        )
    return counters
