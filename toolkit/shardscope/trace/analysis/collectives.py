"""Every collective call: bytes, bandwidth, arrival skew apart from transfer time, and exposed time."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict, get_type_hints

import numpy as np

from shardscope.timing.report import format_seconds
from shardscope.trace.analysis.collective_calls import Call, find_calls
from shardscope.trace.analysis.groups import GroupFinder
from shardscope.trace.analysis.intervals import (
    Int64s,
    Intervals,
    find_exclusive_parts,
    measure_before,
    measure_within,
    merge_intervals,
    select_inside,
    subtract,
    unite,
)
from shardscope.trace.table import Table

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.trace.analysis.activity import RankActivity
    from shardscope.trace.store import Trace

_REDUCE_SCATTER = re.compile(r"c10d::_?reduce_scatter")
_RUN_REDUCE_SCATTER = re.compile(r"\w+:_?reduce_scatter|[nr]ccl\w*ReduceScatter")

_ROUNDING_NS = 2_000
"""Older recordings have starts and durations in whole microseconds."""


class CollectiveRow(TypedDict):
    """One call on one rank. A field is None if it was not recorded."""

    rank: int
    name: str
    """Name of the kernel, or of the annotation on CPU ranks."""
    kind: str
    """``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``send_recv``, ..."""
    group: str
    """Description or name of the process group; empty if unknown."""
    axis: str
    """Axis of the mesh: "tp", "cp", "ep", "dp", "pp", or several joined by "+"; empty if unknown."""
    num_bytes: int | None
    """Bytes of the full vector: the output of an all-gather, the input of a reduction."""
    skew_seconds: float | None
    """Time before the last rank arrived: the duration beyond the shortest one of all ranks."""
    transfer_seconds: float | None
    """The shortest duration across ranks; None if only one rank's call was recorded."""
    algorithm_bandwidth: float | None
    """Bytes over the transfer time, in bytes/s."""
    bus_bandwidth: float | None
    """The same scaled by what each link carries, so that it compares with a link's speed."""
    exposed_seconds: float
    """Time during which the rank computes nothing; concurrent calls share it, so it adds up."""
    track: str
    """The track. This and the next ones are not columns of the data frame."""
    start_seconds: float
    seconds: float
    call: int
    """Number of the collective, the same on all of its ranks; -1 if no other rank's call was found."""
    group_size: int
    """Number of ranks of the group; 0 if unknown."""
    is_reduce_scatter: bool
    """Whether gloo ran a reduce-scatter as this all-reduce; False without recorded shapes."""


_MORE_KEYS = {"track", "start_seconds", "seconds", "call", "group_size", "is_reduce_scatter"}
COLUMNS = tuple(name for name in get_type_hints(CollectiveRow) if name not in _MORE_KEYS)


class AxisRow(TypedDict):
    """Calls of one kind along one axis, per step and averaged over ranks."""

    axis: str
    kind: str
    num_calls: float
    seconds: float
    skew_seconds: float | None
    transfer_seconds: float | None
    exposed_seconds: float
    bus_bandwidth: float | None
    """Bytes on a link of all calls over their transfer time, in bytes/s. A median would be that of the many
    calls of a few bytes, such as those of gradient norms."""


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """The step with an axis's communication changed."""

    axis: str
    link_speed: float
    """Ratio of changed to present link speed; infinite: without the communication."""
    seconds: float
    """Seconds of a step of the slowest rank now."""
    changed_seconds: float
    """Seconds of a step with the change; another rank may then be the slowest."""
    has_steps: bool = True
    """Whether steps are marked in the trace; if not, the seconds are those of the whole recording."""
    has_messages: bool = False
    """Whether messages of pipeline stages are among the calls: what these wait for each other's work is in
    them."""

    @property
    def gain_seconds(self) -> float:
        """Seconds that a step gains."""
        return self.seconds - self.changed_seconds

    @property
    def text(self) -> str:
        """The result as a sentence."""
        what = (
            f"Without the exposed communication of {self.axis or 'unknown groups'}"
            if self.link_speed == float("inf")
            else f"With a link {self.link_speed:g} times as fast for {self.axis or 'unknown groups'}"
        )
        now, changed = format_seconds(self.seconds), format_seconds(self.changed_seconds)
        whole = "a step" if self.has_steps else "the recording"
        text = f"{what}, {whole} would take {changed} instead of {now}."
        if self.has_messages:
            text += " Its messages include waits for other stages (the bubble), which no link removes."
        return text

    def __str__(self) -> str:
        return self.text


class Collectives(Table[CollectiveRow]):
    """Every collective call of every rank."""

    def __init__(self, trace: Trace, rows: list[CollectiveRow], slices: list[int]) -> None:
        super().__init__(rows, COLUMNS)
        self._trace = trace
        self.slices = slices
        """Index of each call's slice in the trace."""

    def sum_by_axis(self) -> Table[AxisRow]:
        """Return the calls summed by axis and kind, per step and averaged over ranks, most exposed first."""
        sums: dict[tuple[str, str], list[CollectiveRow]] = defaultdict(list)
        for row in self.list_in_steps():
            sums[row["axis"], row["kind"]].append(row)
        # Ranks may have recorded different numbers of steps.
        num_steps, num_ranks = self._trace.activity.steps_by_rank, len({row["rank"] for row in self})

        def compute_mean(calls: list[CollectiveRow], values: list[float | None]) -> float | None:
            by_rank: dict[int, float] = {}
            for call, value in zip(calls, values, strict=True):
                if value is not None:
                    by_rank[call["rank"]] = by_rank.get(call["rank"], 0.0) + value
            means = [seconds / num_steps[rank] for rank, seconds in by_rank.items()]
            return sum(means) / num_ranks if means else None

        rows: list[AxisRow] = []
        for (axis, kind), calls in sums.items():
            transfers = [
                (row["bus_bandwidth"], row["transfer_seconds"])
                for row in calls
                if row["bus_bandwidth"] is not None and row["transfer_seconds"] is not None
            ]
            seconds = sum(transfer for _, transfer in transfers)
            rows.append(
                {
                    "axis": axis,
                    "kind": kind,
                    "num_calls": compute_mean(calls, [1.0] * len(calls)) or 0.0,
                    "seconds": compute_mean(calls, [row["seconds"] for row in calls]) or 0.0,
                    "skew_seconds": compute_mean(calls, [row["skew_seconds"] for row in calls]),
                    "transfer_seconds": compute_mean(calls, [row["transfer_seconds"] for row in calls]),
                    "exposed_seconds": compute_mean(calls, [row["exposed_seconds"] for row in calls]) or 0.0,
                    "bus_bandwidth": sum(rate * transfer for rate, transfer in transfers) / seconds
                    if seconds
                    else None,
                }
            )
        rows.sort(key=lambda row: -row["exposed_seconds"])
        return Table(rows, tuple(get_type_hints(AxisRow)))

    def list_in_steps(self) -> list[CollectiveRow]:
        """Return the calls inside of marked steps; all calls of ranks without marks."""
        is_in_steps = self._trace.activity.is_in_steps[self.slices].tolist()
        return [row for row, is_inside in zip(self, is_in_steps, strict=True) if is_inside]

    def what_if(self, axis: str, link_speed: float = float("inf")) -> WhatIf:
        """Return the step's seconds if the axis's links were ``link_speed`` times as fast.

        Infinite, the default: without its exposed communication, skew included. A faster link shortens the
        transfer, not the skew, and gains no more than what is exposed; a slower one is taken to be exposed in
        full. Raises ``ValueError`` if the axis has no calls or ``link_speed`` is not positive.
        """
        axes = sorted({row["axis"] for row in self})
        if axis not in axes:
            allowed = ", ".join(map(repr, axes)) or "none, because this trace has no collectives"
            if axes == [""]:
                # Neither a name of a group nor the plan of a run tells what its ranks have in common.
                allowed = '"" for all of them, because this recording does not tell their axes'
            raise ValueError(f"what_if axis {axis!r} has no collectives. Allowed: {allowed}.")
        if not link_speed > 0:
            raise ValueError(
                f"what_if link_speed {link_speed} is not positive. Fix: 2.0 for twice the speed."
            )
        gains: dict[int, float] = defaultdict(float)
        for row in self.list_in_steps():
            if row["axis"] != axis:
                continue
            transfer = row["seconds"] if row["transfer_seconds"] is None else row["transfer_seconds"]
            exposed = row["exposed_seconds"]
            shorter = transfer - transfer / link_speed
            gains[row["rank"]] += exposed if link_speed == float("inf") else min(exposed, shorter)
        # A step is as long as its slowest rank's.
        steps = list_step_seconds(self._trace)
        return WhatIf(
            axis=axis,
            link_speed=link_speed,
            seconds=measure_step(self._trace),
            changed_seconds=max(seconds - gains[rank] / count for rank, (seconds, count) in steps.items()),
            has_steps=self._trace.activity.has_steps,
            # Context-parallel ranks send messages, too, but have no bubble.
            has_messages=("pp" in axis or not axis)
            and any(row["kind"] == "send_recv" for row in self if row["axis"] == axis),
        )


def list_step_seconds(trace: Trace) -> dict[int, tuple[float, int]]:
    """Return each rank's mean seconds of a step and number of steps; without marks, its span is divided."""
    result: dict[int, tuple[float, int]] = {}
    for rank in trace.activity.ranks:
        count = trace.activity.steps_by_rank[rank.rank]
        steps = [step.end_ns - step.start_ns for step in rank.steps] or [rank.end_ns - rank.start_ns]
        result[rank.rank] = (sum(steps) / count / 1e9, count)
    return result


def measure_step(trace: Trace) -> float:
    """Return the mean seconds of a step of the slowest rank."""
    return max((seconds for seconds, _ in list_step_seconds(trace).values()), default=0.0)


def find_collectives(trace: Trace, plan: Plan | None = None) -> Collectives:
    """Return every collective call; see :meth:`Trace.collectives`."""
    plan = plan or trace.plan
    calls = find_calls(trace, GroupFinder(trace, plan.degrees if plan else None))
    exposed = _measure_exposed(trace, [call.index for call in calls])
    finder = GroupFinder(trace, plan.degrees if plan else None)
    rows = [_make_row(trace, finder, call, int(ns)) for call, ns in zip(calls, exposed.tolist(), strict=True)]
    return Collectives(trace, rows, [call.index for call in calls])


def _make_row(trace: Trace, finder: GroupFinder, call: Call, exposed_ns: int) -> CollectiveRow:
    duration, transfer = int(trace.duration_ns[call.index]), call.transfer_ns
    bandwidth = call.num_bytes / transfer * 1e9 if call.num_bytes and transfer else None
    factor = find_bus_factor(call.kind, call.group_size)
    # A group of one rank is along no axis, and the plan would only name the one that has several ranks.
    ranks = (call.rank,) if call.group_size == 1 else call.group_ranks
    axis = finder.find_axis(call.rank, ranks, call.description)
    return {
        "rank": call.rank,
        "name": trace.names[trace.name_index[call.index]],
        "kind": call.kind,
        "group": call.description or call.group,
        "axis": axis or (finder.find_message_axis() if call.kind == "send_recv" else ""),
        "num_bytes": call.num_bytes,
        "skew_seconds": None if transfer is None else (duration - transfer) / 1e9,
        "transfer_seconds": None if transfer is None else transfer / 1e9,
        "algorithm_bandwidth": bandwidth,
        "bus_bandwidth": bandwidth * factor if bandwidth is not None and factor is not None else None,
        "exposed_seconds": exposed_ns / 1e9,
        "track": trace.tracks[trace.track_index[call.index]].name,
        "start_seconds": int(trace.start_ns[call.index]) / 1e9,
        "seconds": duration / 1e9,
        "call": call.call,
        "group_size": call.group_size,
        "is_reduce_scatter": call.is_reduce_scatter,
    }


def find_gloo_note(trace: Trace) -> str:
    """Return a sentence on reduce-scatters that gloo recorded as all-reduces; empty if there are none."""
    # ProcessGroupGloo has no reduce-scatter: it reduces the whole vector, and each rank keeps its shard
    # (torch 2.13, ProcessGroupGloo::reduce_scatter_tensor_coalesced).
    requested = any(map(_REDUCE_SCATTER.match, trace.names))
    # Beside gloo, NCCL may have run them.
    if (
        not requested
        or "gloo:all_reduce" not in trace.names
        or any(map(_RUN_REDUCE_SCATTER.match, trace.names))
    ):
        return ""
    return "Reduce-scatters are among the all-reduces: gloo runs them as all-reduces."


def find_bus_factor(kind: str, num_ranks: int) -> float | None:
    """Return bus divided by algorithm bandwidth (nccl-tests, doc/PERFORMANCE.md); None if size is unknown."""
    if kind in ("broadcast", "reduce", "send_recv"):
        return 1.0
    if num_ranks < 2:
        return None
    share = (num_ranks - 1) / num_ranks
    return {"all_reduce": 2 * share, "all_gather": share, "reduce_scatter": share, "all_to_all": share}.get(
        kind
    )


def _measure_exposed(trace: Trace, index: list[int]) -> Int64s:
    """Return each call's nanoseconds without compute; overlapping time counts for the earliest call."""
    activity, calls = trace.activity, np.array(index, np.int64)
    exposed = np.zeros(len(calls), np.int64)
    ranks = activity.rank_of_track[trace.track_index[calls]] if len(calls) else calls
    for rank in activity.ranks:
        positions = np.flatnonzero(ranks == rank.rank)
        start, end = find_exclusive_parts(trace.start_ns[calls[positions]], activity.end_ns[calls[positions]])
        exposed[positions] = (end - start) - measure_within(rank.compute, start, end)
    return exposed


def measure_waits(trace: Trace, index: list[int]) -> Int64s:
    """Return for how long each call's rank waits in it; overlapping time counts for the earliest call."""
    activity, calls = trace.activity, np.array(index, np.int64)
    waits = np.zeros(len(calls), np.int64)
    ranks = activity.rank_of_track[trace.track_index[calls]] if len(calls) else calls
    for rank in activity.ranks:
        positions = np.flatnonzero(ranks == rank.rank)
        start, end = trace.start_ns[calls[positions]], activity.end_ns[calls[positions]]
        found = _find_waits(rank, start, end, rank.compute)
        waits[positions] = measure_within(found, *find_exclusive_parts(start, end))
    return waits


def measure_waits_before(trace: Trace, rank: RankActivity, calls: Int64s) -> Int64s:
    """Return for how long a rank had waited in calls of one group at the start of each of them.

    It does not wait while it computes, nor in calls of other groups that begin and end meanwhile: it goes on
    to these.
    """
    start, end = trace.start_ns[calls], trace.activity.end_ns[calls]
    others = np.flatnonzero(trace.activity.is_communication[rank.index]) + rank.index.start
    others = np.setdiff1d(others, calls)
    inside = select_inside(trace.start_ns[others], trace.activity.end_ns[others], start, end)
    busy = unite(rank.compute, merge_intervals(*inside))
    return measure_before(_find_waits(rank, start, end, busy), start)


def _find_waits(rank: RankActivity, start: Int64s, end: Int64s, busy: Intervals) -> Intervals:
    """Return when a rank waits in calls: it is idle, on a GPU until one of them ends.

    A GPU that is idle and goes on before waits for its host. On CPU ranks the thread that waits may go on
    some ms before gloo records the end.
    """
    idle = subtract(merge_intervals(start, end), busy)
    if not rank.on_gpu:
        return idle
    ends = np.sort(end)
    first = np.searchsorted(ends, idle.start, side="right")
    is_wait = np.searchsorted(ends, idle.end + _ROUNDING_NS, side="right") > first
    return Intervals(idle.start[is_wait], idle.end[is_wait])
