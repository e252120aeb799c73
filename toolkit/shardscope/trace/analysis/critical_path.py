"""The critical path: the chain of work and waits that ends last, followed backwards across streams and ranks.

Nothing off the path shortens the step. The path has no gaps: its parts add up to the time that it spans.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, TypedDict, get_type_hints

import numpy as np

from shardscope.trace.analysis.activity import RankActivity
from shardscope.trace.analysis.collectives import find_collectives
from shardscope.trace.analysis.intervals import Int64s, find_exclusive_parts, subtract
from shardscope.trace.categories import RUNTIME_CATEGORIES
from shardscope.trace.table import Table

if TYPE_CHECKING:
    from shardscope.trace.store import Trace

SYNCHRONIZATION = re.compile(r"(?:Stream|Device|Event)Synchronize|cudaMemcpy$|hipMemcpy$|cudaFree$")
"""Runtime calls that wait for the GPU."""
STREAM_GAP_NS = 2_000
"""A kernel that starts within this time of the end of its stream's previous one waited for that one."""
PYTHON = "no operator recorded (Python)"
WAIT = "waits for another stream, or launch latency"


class PathRow(TypedDict):
    """One part of the path, in order of time."""

    rank: int
    track: str
    name: str
    start_seconds: float
    seconds: float
    kind: str
    """``compute``, ``communication``, ``copy``, ``host`` or ``wait``; not a column of the data frame."""


class KindShare(TypedDict):
    """Time of the path of one kind."""

    kind: str
    seconds: float
    share: float


class CriticalPath(Table[PathRow]):
    """Parts of the critical path from its begin to its end."""

    def __init__(self, rows: list[PathRow]) -> None:
        super().__init__(rows, tuple(name for name in get_type_hints(PathRow) if name != "kind"))

    @property
    def seconds(self) -> float:
        """Seconds that the path spans."""
        return sum(row["seconds"] for row in self)

    def sum_by_kind(self) -> Table[KindShare]:
        """Return the path's time by kind, most first."""
        sums: dict[str, float] = {}
        for row in self:
            sums[row["kind"]] = sums.get(row["kind"], 0.0) + row["seconds"]
        total = self.seconds
        rows: list[KindShare] = [
            {"kind": kind, "seconds": seconds, "share": seconds / total if total else 0.0}
            for kind, seconds in sorted(sums.items(), key=lambda item: -item[1])
        ]
        return Table(rows, tuple(get_type_hints(KindShare)))


class _Piece(NamedTuple):
    """A part of the path, while it is followed backwards. ``index`` -1: no slice."""

    rank: int
    track: str
    name: str
    start_ns: int
    end_ns: int
    kind: str


def find_critical_path(trace: Trace, step: int | None = None) -> CriticalPath:
    """Return the parts of the path; see :meth:`Trace.critical_path`."""
    ranks = trace.activity.ranks
    start_ns, ends = 0, {rank.rank: rank.end_ns for rank in ranks if rank.end_ns}
    marked = {rank.rank: [one for one in rank.steps if step in (None, one.number)] for rank in ranks}
    windows = [one for steps in marked.values() for one in steps]
    if step is not None and not windows:
        known = sorted({one.number for rank in ranks for one in rank.steps})
        raise ValueError(
            f"critical_path step {step} was not recorded. Allowed: {known}. Fix: pass one of them."
        )
    if windows:
        start_ns = min(window.start_ns for window in windows)
        ends = {rank: max(one.end_ns for one in steps) for rank, steps in marked.items() if steps}
    if not ends:
        return CriticalPath([])
    last = max(ends, key=lambda rank: ends[rank])
    pieces = _Walk(trace, start_ns).follow(last, ends[last])
    rows: list[PathRow] = []
    for piece in reversed(pieces):
        seconds = (piece.end_ns - piece.start_ns) / 1e9
        # Consecutive parts of the same name become one row.
        if (
            rows
            and rows[-1]["name"] == piece.name
            and (rows[-1]["rank"], rows[-1]["track"]) == piece[:2]
            and (piece.kind in ("host", "wait"))
        ):
            rows[-1]["seconds"] += seconds
            continue
        rows.append(
            {
                "rank": piece.rank,
                "track": piece.track,
                "name": piece.name,
                "start_seconds": piece.start_ns / 1e9,
                "seconds": seconds,
                "kind": piece.kind,
            }
        )
    return CriticalPath(rows)


class _RankWork:
    """Sorted columns of one rank that the walk searches."""

    def __init__(self, trace: Trace, rank: RankActivity) -> None:
        self.trace, self.rank = trace, rank
        activity = trace.activity
        first = rank.index.start
        # GPU work by its end, over all streams and per stream.
        work = np.flatnonzero(activity.is_gpu_work[rank.index]) + first
        self.work = work[np.argsort(activity.end_ns[work], kind="stable")]
        self.ends = activity.end_ns[self.work]
        tracks = trace.track_index[self.work]
        self.streams = {int(track): self.work[tracks == track] for track in np.unique(tracks)}
        # Outermost CPU slices of all threads, cut so that no two overlap.
        is_wrapper = activity.is_wrapper if rank.on_gpu else activity.is_wrapper_of_compute
        on_cpu = ~activity.on_gpu[rank.index] & ~is_wrapper[rank.index]
        cpu = np.flatnonzero(on_cpu & ~activity.is_python[rank.index]) + first
        parents = trace.parents[cpu]
        outermost = cpu[(parents < 0) | is_wrapper[np.maximum(parents, 0)]]
        start, end = find_exclusive_parts(trace.start_ns[outermost], activity.end_ns[outermost])
        order = np.flatnonzero(end > start)
        order = order[np.argsort(start[order], kind="stable")]
        self.cpu, self.cpu_start, self.cpu_end = outermost[order], start[order], end[order]

    @cached_property
    def blocks(self) -> tuple[Int64s, Int64s, Int64s]:
        """Ends of the runtime calls that waited for the GPU, the calls, and the work that they waited for."""
        trace, activity, index = self.trace, self.trace.activity, self.rank.index
        is_call = activity.mask_categories(RUNTIME_CATEGORIES)[index] & ~activity.on_gpu[index]
        waits = np.flatnonzero(is_call & activity.mask_names(SYNCHRONIZATION)[index]) + index.start
        # A copy to pageable memory returns when it is done, though its call is named asynchronous.
        copies = self.work[activity.is_copy[self.work] & (activity.launches[self.work] >= 0)]
        launches = activity.launches[copies]
        waits = np.union1d(waits, launches[activity.end_ns[copies] <= activity.end_ns[launches]])
        before = np.searchsorted(self.ends, activity.end_ns[waits], side="right") - 1
        is_blocked = (
            (before >= 0) & (self.ends[np.maximum(before, 0)] > trace.start_ns[waits])
            if len(self.ends)
            else np.zeros(len(waits), bool)
        )
        waits, before = waits[is_blocked], before[is_blocked]
        order = np.argsort(activity.end_ns[waits], kind="stable")
        return activity.end_ns[waits][order], waits[order], self.work[before[order]]

    @cached_property
    def exposed(self) -> tuple[Int64s, Int64s]:
        """Starts and ends of a CPU rank's communication without compute, ascending."""
        exposed = subtract(self.rank.communication, self.rank.compute)
        return exposed.start, exposed.end

    @cached_property
    def collectives(self) -> tuple[Int64s, Int64s]:
        """Communication by start, and the starts."""
        activity, index = self.trace.activity, self.rank.index
        calls = np.flatnonzero(activity.is_communication[index]) + index.start
        calls = calls[np.argsort(self.trace.start_ns[calls], kind="stable")]
        return calls, self.trace.start_ns[calls]


class _Walk:
    """The walk backwards in time. Each added part ends where the previously added one begins."""

    def __init__(self, trace: Trace, start_ns: int) -> None:
        self.trace, self.start_ns = trace, start_ns
        self.works = {rank.rank: _RankWork(trace, rank) for rank in trace.activity.ranks}
        self.pieces: list[_Piece] = []
        self.last_arrivals = self._find_last_arrivals()

    def _find_last_arrivals(self) -> dict[int, int]:
        """Return the slice of the last rank to arrive for each other slice of its collective."""
        calls: dict[int, list[tuple[float, int]]] = {}
        collectives = find_collectives(self.trace)
        for row, index in zip(collectives, collectives.slices, strict=True):
            if row["call"] >= 0:
                calls.setdefault(row["call"], []).append((row["seconds"], index))
        arrivals: dict[int, int] = {}
        for together in calls.values():
            _, last = min(together)
            arrivals |= {index: last for _, index in together if index != last}
        return arrivals

    def follow(self, rank: int, end_ns: int) -> list[_Piece]:
        """Return the parts from the end back to the start."""
        time, kernel = end_ns, self._find_kernel_that_ends(rank, end_ns)
        while time > self.start_ns:
            work = self.works[rank]
            before = time, rank, kernel
            if kernel is not None:
                rank, time, kernel = self._pass_kernel(rank, time, kernel)
            elif work.rank.on_gpu:
                time, kernel = self._pass_host(work, time)
            else:
                rank, time = self._pass_cpu_rank(work, time)
            if (time, rank, kernel) == before or time <= self.works[rank].rank.start_ns:
                break
        return self.pieces

    def _find_kernel_that_ends(self, rank: int, time: int) -> int | None:
        """Return the GPU work that ends exactly at ``time``, the path's end; None if there is none."""
        work = self.works[rank]
        position = int(np.searchsorted(work.ends, time, side="right")) - 1
        if position < 0:
            return None
        # A step ends with the GPU's work where that is later than the host's.
        return int(work.work[position]) if int(work.ends[position]) == time else None

    def _add_part(self, rank: int, track: str, name: str, start: int, end: int, kind: str) -> int:
        """Add a part, unless it is empty, cut at the start of the path. Return where it begins."""
        start = max(start, self.start_ns)
        if end > start:
            self.pieces.append(_Piece(rank, track, name, start, end, kind))
        return min(start, end)

    def _add_slice(self, rank: int, index: int, start: int, end: int, kind: str) -> int:
        trace = self.trace
        track, name = trace.tracks[trace.track_index[index]].name, trace.names[trace.name_index[index]]
        return self._add_part(rank, track, name, start, end, kind)

    def _pass_kernel(self, rank: int, time: int, kernel: int) -> tuple[int, int, int | None]:
        """Pass one kernel or copy. Return the rank, time and kernel (None: the host) that it waited for."""
        trace, activity = self.trace, self.trace.activity
        start = int(trace.start_ns[kernel])
        kind = "copy" if activity.is_copy[kernel] else "compute"
        if activity.is_communication[kernel]:
            kind = "communication"
            last = self.last_arrivals.get(kernel)
            if last is not None and start < int(trace.start_ns[last]) < time:
                # The other ranks wait for the last one: continue with the cause of its delay.
                arrival = int(trace.start_ns[last])
                self._add_slice(rank, kernel, arrival, time, kind)
                other = trace.tracks[trace.track_index[last]].rank
                return self._find_cause(other, arrival, last)
        time = self._add_slice(rank, kernel, start, time, kind)
        return self._find_cause(rank, time, kernel)

    def _find_cause(self, rank: int, time: int, kernel: int) -> tuple[int, int, int | None]:
        """Return the GPU work, or the launch, that the kernel starting at ``time`` waited for."""
        trace, activity, work = self.trace, self.trace.activity, self.works[rank]
        track = trace.tracks[trace.track_index[kernel]].name
        launch = int(activity.launches[kernel])
        position = int(np.searchsorted(work.ends, time, side="right")) - 1
        # Slices of no length would be followed forever: skip those that do not start earlier.
        while position >= 0 and int(trace.start_ns[work.work[position]]) >= time:
            position -= 1
        previous = int(work.work[position]) if position >= 0 else -1
        stream = work.streams[int(trace.track_index[kernel])]
        on_stream = int(np.searchsorted(activity.end_ns[stream], time, side="right")) - 1
        before = int(stream[on_stream]) if on_stream >= 0 else -1
        is_close = before >= 0 and time - int(activity.end_ns[before]) <= STREAM_GAP_NS
        if is_close and int(trace.start_ns[before]) < time:
            previous = before
        launched = int(trace.start_ns[launch]) if launch >= 0 else -1
        if previous >= 0 and int(activity.end_ns[previous]) > launched:
            time = self._add_part(rank, track, WAIT, int(activity.end_ns[previous]), time, "wait")
            return rank, time, previous
        if launch >= 0 and launched < time:
            return rank, self._add_slice(rank, launch, launched, time, "host"), None
        return rank, time, None

    def _pass_host(self, work: _RankWork, time: int) -> tuple[int, int | None]:
        """Pass the work of the host since it last waited for the GPU. Return that time and the GPU work."""
        rank = work.rank.rank
        ends, waits, kernels = work.blocks
        position = int(np.searchsorted(ends, time, side="right")) - 1
        while position >= 0 and int(self.trace.activity.end_ns[kernels[position]]) >= time:
            position -= 1
        if position < 0:
            return self._add_host(work, max(self.start_ns, work.rank.start_ns), time), None
        wait, kernel = int(waits[position]), int(kernels[position])
        done = int(self.trace.activity.end_ns[kernel])
        time = self._add_host(work, int(ends[position]), time)
        return self._add_slice(rank, wait, done, time, "host"), kernel

    def _pass_cpu_rank(self, work: _RankWork, time: int) -> tuple[int, int]:
        """Pass the work of a CPU rank, or the collective that it waited for. Return the late rank."""
        rank, trace = work.rank.rank, self.trace
        starts, ends = work.exposed
        position = int(np.searchsorted(starts, time, side="left")) - 1
        if position < 0:
            return rank, self._add_host(work, max(self.start_ns, work.rank.start_ns), time)
        if int(ends[position]) < time:
            return rank, self._add_host(work, int(ends[position]), time)
        # Inside exposed communication: take the latest call that began before.
        calls, call_starts = work.collectives
        call = int(calls[int(np.searchsorted(call_starts, time, side="left")) - 1])
        start = max(int(trace.start_ns[call]), int(starts[position]))
        last = self.last_arrivals.get(call)
        if last is not None and start < int(trace.start_ns[last]) < time:
            arrival = int(trace.start_ns[last])
            self._add_slice(rank, call, arrival, time, "communication")
            return trace.tracks[trace.track_index[last]].rank, arrival
        return rank, self._add_slice(rank, call, start, time, "communication")

    def _add_host(self, work: _RankWork, start: int, end: int) -> int:
        """Add the operators of the CPU threads between two times, latest first, and Python between them."""
        rank, trace = work.rank.rank, self.trace
        start = max(start, self.start_ns)
        first = int(np.searchsorted(work.cpu_end, start, side="right"))
        last = int(np.searchsorted(work.cpu_start, end, side="left"))
        track = ""
        for number in range(last - 1, first - 1, -1):
            index = int(work.cpu[number])
            track = trace.tracks[trace.track_index[index]].name
            piece_end = min(int(work.cpu_end[number]), end)
            end = self._add_part(rank, track, PYTHON, piece_end, end, "host")
            kind = "compute" if trace.activity.is_compute[index] else "host"
            end = self._add_slice(rank, index, max(int(work.cpu_start[number]), start), end, kind)
        return self._add_part(rank, track or _name_busiest_thread(trace, rank), PYTHON, start, end, "host")


def _name_busiest_thread(trace: Trace, rank: int) -> str:
    return next((track.name for track in trace.tracks if track.rank == rank and track.kind == "cpu"), "")
