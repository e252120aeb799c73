"""Breakdown of the time of each rank and step: compute, communication, copies, and idle time by cause."""

from __future__ import annotations

import re
from typing import NamedTuple, TypedDict, get_type_hints

import numpy as np

from shardscope.trace.analysis.activity import DATA_LOADING, RankActivity
from shardscope.trace.analysis.intervals import (
    EMPTY,
    Int64s,
    Intervals,
    intersect,
    measure_within,
    merge_intervals,
    subtract,
    unite,
)
from shardscope.trace.store import Trace
from shardscope.trace.table import Table

HOST_BOUND, COLLECTIVE_WAIT, DATA_WAIT, OTHER = (
    "host-bound",
    "waiting for a collective",
    "data loading",
    "other",
)
CAUSES = (HOST_BOUND, COLLECTIVE_WAIT, DATA_WAIT, OTHER)
"""Causes of idle time. Host-bound: the work that ends the gap was launched after the gap had begun. Of a gap
that lasts longer than :data:`MAX_LAUNCH_LATENCY_NS` beyond that launch, only the time until the launch is."""

MAX_LAUNCH_LATENCY_NS = 200_000
"""Longest time from the end of a launch to its work that counts as the launch's: kernels take a few
microseconds, CUDA graphs up to 0.2 ms. Work that begins later waited for something on the GPU."""

_REQUESTS = re.compile(r"c10d::|_c10d_functional::")
_BARRIERS = re.compile(r"^c10d::(?:monitored_)?barrier")

MIN_STEPS_FOR_OUTLIERS = 5
_OUTLIER_DEVIATIONS = 5.0
_OUTLIER_SHARE = 0.1


class BreakdownRow(TypedDict):
    """Times of one rank. ``compute + exposed communication + copies + idle = span``."""

    rank: int
    compute_seconds: float
    communication_seconds: float
    overlapped_seconds: float
    """Communication during which the rank also computes."""
    exposed_communication_seconds: float
    copy_seconds: float
    """Copies overlapped with neither compute nor communication."""
    idle_seconds: float
    span_seconds: float
    start_seconds: float
    """Start of the span, in the trace's time; not a column of the data frame."""


class StepRow(BreakdownRow):
    """Times of one step of one rank."""

    step: int
    """Number in the name of its ``ProfilerStep``."""
    is_outlier: bool
    """Whether it took much longer than the rank's other steps; needs five steps."""


class OverlapRow(TypedDict):
    """Overlapped communication of one rank."""

    rank: int
    overlapped_seconds: float
    communication_seconds: float
    share: float | None
    """Overlapped part of the communication; None if there is none."""


class IdleRow(TypedDict):
    """Idle time of one rank by one of :data:`CAUSES`."""

    rank: int
    cause: str
    seconds: float
    share: float
    """Share of the rank's span."""
    track: str
    """Track of the work that ends the longest gap. This and the next two are not columns."""
    start_seconds: float
    """Start of the longest gap."""
    end_seconds: float


_BREAKDOWN_COLUMNS = tuple(name for name in get_type_hints(BreakdownRow) if name != "start_seconds")
_STEP_COLUMNS = ("rank", "step", *_BREAKDOWN_COLUMNS[1:], "is_outlier")


class _Parts(NamedTuple):
    """Nanoseconds of several windows of one rank, each an array with an entry per window."""

    compute: Int64s
    communication: Int64s
    overlapped: Int64s
    copies: Int64s
    idle: Int64s
    span: Int64s


def compute_breakdown(trace: Trace) -> Table[BreakdownRow]:
    """Return one row per rank; see :meth:`Trace.breakdown`."""
    rows = []
    for rank in trace.activity.ranks:
        start, end = np.array([rank.start_ns]), np.array([rank.end_ns])
        rows += _make_rows(rank, start, _measure_parts(rank, start, end))
    return Table(rows, _BREAKDOWN_COLUMNS)


def compute_steps(trace: Trace) -> Table[StepRow]:
    """Return one row per rank and step; see :meth:`Trace.steps`."""
    rows: list[StepRow] = []
    for rank in trace.activity.ranks:
        start = np.array([step.start_ns for step in rank.steps], np.int64)
        end = np.array([step.end_ns for step in rank.steps], np.int64)
        # By the host's times: after a last step, the GPU may have to catch up with work of all of them.
        host_end = np.array([step.host_end_ns for step in rank.steps], np.int64)
        is_outlier = mark_outliers(host_end - start)
        for row, step, outlier in zip(
            _make_rows(rank, start, _measure_parts(rank, start, end)), rank.steps, is_outlier, strict=True
        ):
            rows.append({**row, "step": step.number, "is_outlier": outlier})
    return Table(rows, _STEP_COLUMNS)


def mark_outliers(durations: Int64s) -> list[bool]:
    """Return whether each step took much longer than the median step: by a tenth and by five deviations.

    The deviation is the median one, scaled to a normal distribution's (Leys et al. 2013, eq. 1).
    """
    if len(durations) < MIN_STEPS_FOR_OUTLIERS:
        return [False] * len(durations)
    median = np.median(durations)
    deviation = 1.4826 * np.median(np.abs(durations - median))
    limit = median + max(_OUTLIER_DEVIATIONS * deviation, _OUTLIER_SHARE * median)
    return [bool(duration > limit) for duration in durations]


def compute_overlap(trace: Trace) -> Table[OverlapRow]:
    """Return one row per rank; see :meth:`Trace.overlap`."""
    columns = tuple(get_type_hints(OverlapRow))
    rows: list[OverlapRow] = []
    for row in compute_breakdown(trace):
        communication = row["communication_seconds"]
        rows.append(
            {
                "rank": row["rank"],
                "overlapped_seconds": row["overlapped_seconds"],
                "communication_seconds": communication,
                "share": row["overlapped_seconds"] / communication if communication else None,
            }
        )
    return Table(rows, columns)


def compute_idle(trace: Trace, *, in_steps: bool = False) -> Table[IdleRow]:
    """Return one row per rank and cause; see :meth:`Trace.idle`. ``in_steps``: only of marked steps."""
    rows: list[IdleRow] = []
    for rank in trace.activity.ranks:
        start_ns, end_ns = rank.start_ns, rank.end_ns
        if in_steps and rank.steps:
            start_ns, end_ns = rank.steps[0].start_ns, rank.steps[-1].end_ns
        span = max(end_ns - start_ns, 1)
        window = merge_intervals(np.array([start_ns]), np.array([end_ns]))
        for cause, gaps in find_idle(trace, rank).items():
            gaps = intersect(gaps, window)
            lengths = gaps.end - gaps.start
            longest = int(np.argmax(lengths)) if len(lengths) else -1
            start, end = (int(gaps.start[longest]), int(gaps.end[longest])) if longest >= 0 else (0, 0)
            rows.append(
                {
                    "rank": rank.rank,
                    "cause": cause,
                    "seconds": gaps.total_ns / 1e9,
                    "share": gaps.total_ns / span,
                    "track": _find_next_track(trace, rank, end) if longest >= 0 else "",
                    "start_seconds": start / 1e9,
                    "end_seconds": end / 1e9,
                }
            )
    return Table(rows, ("rank", "cause", "seconds", "share"))


def find_idle(trace: Trace, rank: RankActivity) -> dict[str, Intervals]:
    """Return the rank's idle time by cause, every name of :data:`CAUSES`. The sets are disjoint.

    Where several causes hold, data loading comes first, then waiting for a collective.
    """
    known = trace.activity.idle_of_ranks
    if rank.rank not in known:
        known[rank.rank] = _divide_idle(trace, rank)
    return known[rank.rank]


def _divide_idle(trace: Trace, rank: RankActivity) -> dict[str, Intervals]:
    whole = merge_intervals(np.array([rank.start_ns]), np.array([rank.end_ns]))
    left = gaps = subtract(whole, unite(rank.compute, rank.communication, rank.copies))
    if not rank.on_gpu:
        host_bound = _find_python_time(trace, rank)
    else:
        # A file that ends in the middle may have lost the work that ran in a gap.
        is_cut_off = rank.rank in trace.cut_off
        host_bound = EMPTY if is_cut_off else _find_host_bound(trace, rank, gaps)
    candidates = {
        DATA_WAIT: _find_data_loading(trace, rank),
        COLLECTIVE_WAIT: _find_host_collectives(trace, rank),
        HOST_BOUND: host_bound,
    }
    by_cause: dict[str, Intervals] = {}
    for cause, intervals in candidates.items():
        by_cause[cause] = intersect(left, intervals)
        left = subtract(left, intervals)
    by_cause[OTHER] = left
    return {cause: by_cause[cause] for cause in CAUSES}


def _find_data_loading(trace: Trace, rank: RankActivity) -> Intervals:
    activity, index = trace.activity, rank.index
    loads = activity.mask_names(DATA_LOADING)[index] & ~activity.on_gpu[index] & ~activity.is_python[index]
    return merge_intervals(trace.start_ns[index][loads], activity.end_ns[index][loads])


def _find_host_collectives(trace: Trace, rank: RankActivity) -> Intervals:
    """Return the intervals of collectives on the CPU of a rank with a GPU, such as a barrier over gloo."""
    activity, index = trace.activity, rank.index
    is_barrier = activity.mask_names(_BARRIERS)[index] & ~activity.is_python[index]
    waits = activity.is_host_collective[index] | (is_barrier & ~activity.on_gpu[index])
    return merge_intervals(trace.start_ns[index][waits], activity.end_ns[index][waits])


def _find_host_bound(trace: Trace, rank: RankActivity, gaps: Intervals) -> Intervals:
    """Return the time in which a GPU had nothing queued: until the next work, which was launched in the gap.

    Work that begins long after its launch waited in its queue: there the time ends with the launch. Nothing
    was queued in the gap after the last work either.
    """
    activity = trace.activity
    work = np.flatnonzero(activity.is_gpu_work[rank.index]) + rank.index.start
    work = work[np.argsort(trace.start_ns[work], kind="stable")]
    following = np.searchsorted(trace.start_ns[work], gaps.end, side="left")
    has_next = following < len(work)
    launches = activity.launches[work[np.minimum(following, len(work) - 1)]]
    launched_late = has_next & (launches >= 0) & (trace.start_ns[launches] >= gaps.start)
    launched = np.maximum(activity.end_ns[launches], gaps.start)
    is_queued = launched_late & (gaps.end - launched > MAX_LAUNCH_LATENCY_NS)
    end = np.where(is_queued, launched, gaps.end)
    launched_late |= ~has_next & bool((activity.launches[work] >= 0).any())
    return merge_intervals(gaps.start[launched_late], end[launched_late])


def _find_python_time(trace: Trace, rank: RankActivity) -> Intervals:
    """Return the intervals of a CPU rank inside a step or another slice: idle time there is Python's.

    Without marks of steps, it is all time between slices.
    """
    activity, index = trace.activity, rank.index
    if not rank.steps:
        return merge_intervals(np.array([rank.start_ns]), np.array([rank.end_ns]))
    inside = ~activity.on_gpu[index]
    return merge_intervals(trace.start_ns[index][inside], activity.end_ns[index][inside])


def measure_requests(trace: Trace) -> float:
    """Return a step's idle seconds in which a thread requests a collective, averaged over complete ranks.

    For CPU ranks: their host-bound time is "between operators", but c10d's operators may take most of it.
    """
    activity, total = trace.activity, 0.0
    # Work that a file lost because it ends in the middle looks like idle time.
    complete = [rank for rank in activity.ranks if rank.rank not in trace.cut_off]
    is_request = activity.mask_names(_REQUESTS, "match")
    for rank in complete:
        start, end = rank.start_ns, rank.end_ns
        if rank.steps:
            start, end = rank.steps[0].start_ns, rank.steps[-1].end_ns
        own = np.flatnonzero(is_request[rank.index]) + rank.index.start
        requests = merge_intervals(trace.start_ns[own], activity.end_ns[own])
        idle = intersect(find_idle(trace, rank)[HOST_BOUND], requests)
        (inside,) = measure_within(idle, np.array([start]), np.array([end])).tolist()
        total += inside / 1e9 / activity.steps_by_rank[rank.rank]
    return total / max(len(complete), 1)


def _find_next_track(trace: Trace, rank: RankActivity, time_ns: int) -> str:
    """Return the track with the first work that begins at or after a time."""
    activity, index = trace.activity, rank.index
    works = activity.is_compute[index] | activity.is_communication[index] | activity.is_copy[index]
    starts = np.where(
        works & (trace.start_ns[index] >= time_ns), trace.start_ns[index], np.iinfo(np.int64).max
    )
    if not len(starts) or not np.any(works & (trace.start_ns[index] >= time_ns)):
        return ""
    return trace.tracks[int(trace.track_index[index][int(np.argmin(starts))])].name


def _measure_parts(rank: RankActivity, start: Int64s, end: Int64s) -> _Parts:
    """Return the parts of each window from ``start`` to ``end``."""
    compute, communication = rank.compute, rank.communication
    works = unite(compute, communication)
    busy = unite(works, rank.copies)
    measured = {
        "compute": measure_within(compute, start, end),
        "communication": measure_within(communication, start, end),
        "overlapped": measure_within(intersect(compute, communication), start, end),
        "copies": measure_within(busy, start, end) - measure_within(works, start, end),
    }
    return _Parts(**measured, idle=end - start - measure_within(busy, start, end), span=end - start)


def _make_rows(rank: RankActivity, start: Int64s, parts: _Parts) -> list[BreakdownRow]:
    return [
        {
            "rank": rank.rank,
            "compute_seconds": compute / 1e9,
            "communication_seconds": communication / 1e9,
            "overlapped_seconds": overlapped / 1e9,
            "exposed_communication_seconds": (communication - overlapped) / 1e9,
            "copy_seconds": copies / 1e9,
            "idle_seconds": idle / 1e9,
            "span_seconds": span / 1e9,
            "start_seconds": first / 1e9,
        }
        for first, compute, communication, overlapped, copies, idle, span in zip(
            start.tolist(), *(part.tolist() for part in parts), strict=True
        )
    ]
