"""Two traces compared per step: which kernels, collectives and gaps take longer in the other."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, TypedDict, get_type_hints

import numpy as np

from shardscope.timing.report import format_seconds
from shardscope.trace.analysis.breakdown import OTHER, find_idle
from shardscope.trace.analysis.collectives import measure_step
from shardscope.trace.analysis.intervals import measure_within
from shardscope.trace.analysis.kernels import find_kinds, list_kinds, measure_work_ns, shorten_name
from shardscope.trace.table import Table

if TYPE_CHECKING:
    from shardscope.trace.store import Trace

IDLE = "idle"
"""Kind of a row of idle time; its name is the cause."""
MIN_SHARE = 0.01
"""Least difference that the text names, as a share of the step."""
NUM_NAMED = 3
"""Number of differences that the text names."""


class DiffRow(TypedDict):
    """Seconds of one step, averaged over ranks and steps, in both traces."""

    name: str
    """Kernel, operator, collective, or cause of idle time. A kernel that only one of the traces has is
    counted under the operator that launched it: other hardware has other kernels for it."""
    kind: str
    """Class of the kernel, or "idle"."""
    seconds: float
    other_seconds: float
    difference_seconds: float
    """Positive: the other trace takes longer."""


class Diff(Table[DiffRow]):
    """Differences, largest first, and the largest in a sentence."""

    def __init__(self, rows: list[DiffRow], text: str) -> None:
        super().__init__(rows, tuple(get_type_hints(DiffRow)), text=text)


def compare_traces(trace: Trace, other: Trace) -> Diff:
    """Return the differences; see :meth:`Trace.diff`."""
    works = [_sum_work(one) for one in (trace, other)]
    names = [{name for name, _, _ in work} for work in works]
    common = names[0] & names[1]
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for side, work in enumerate(works):
        for (name, kind, operator), seconds in work.items():
            sums[name if name in common or not operator else operator, kind][side] += seconds
    for side, one in enumerate((trace, other)):
        for cause, seconds in _sum_idle(one).items():
            sums[cause, IDLE][side] += seconds
    rows: list[DiffRow] = [
        {
            "name": name,
            "kind": kind,
            "seconds": here,
            "other_seconds": there,
            "difference_seconds": there - here,
        }
        for (name, kind), (here, there) in sums.items()
        if here or there
    ]
    rows.sort(key=lambda row: (-abs(row["difference_seconds"]), row["name"]))
    return Diff(rows, _describe_differences(rows, trace, other))


def list_windows(trace: Trace) -> dict[int, tuple[int, int, int]]:
    """Return begin, end and number of each rank's steps; a rank without marks of steps has its span."""
    counts = trace.activity.steps_by_rank
    return {
        rank.rank: (rank.steps[0].start_ns, rank.steps[-1].end_ns, counts[rank.rank])
        if rank.steps
        else (rank.start_ns, rank.end_ns, counts[rank.rank])
        for rank in trace.activity.ranks
    }


def _sum_work(trace: Trace) -> dict[tuple[str, str, str], float]:
    """Return seconds per step and rank by name, class and launching operator ("" if unknown)."""
    activity = trace.activity
    kinds, work_ns, kind_names = find_kinds(trace), measure_work_ns(trace), list_kinds()
    index = np.flatnonzero(kinds >= 0)
    ranks = activity.rank_of_track[trace.track_index[index]]
    weights = np.zeros(len(index))
    for rank, (start, end, count) in list_windows(trace).items():
        inside = (ranks == rank) & (trace.start_ns[index] >= start) & (trace.start_ns[index] <= end)
        weights[inside] = 1 / count / len(trace.ranks) / 1e9
    launches = activity.launches[index]
    around = np.where(launches >= 0, trace.parents[launches], -1)
    operators = np.where(around >= 0, trace.name_index[around], -1)
    # One number for each combination; the last operator, -1, becomes 0.
    num_operators = len(trace.names) + 1
    keys = (trace.name_index[index].astype(np.int64) * len(kind_names) + kinds[index]) * num_operators
    unique, group = np.unique(keys + operators + 1, return_inverse=True)
    seconds = np.bincount(group, weights=work_ns[index] * weights, minlength=len(unique))
    sums: dict[tuple[str, str, str], float] = {}
    for key, total in zip(unique.tolist(), seconds.tolist(), strict=True):
        combination, operator = divmod(key, num_operators)
        name, kind = divmod(combination, len(kind_names))
        launched_by = trace.names[operator - 1] if operator else ""
        sums[trace.names[name], kind_names[kind], launched_by] = total
    return sums


def _sum_idle(trace: Trace) -> dict[str, float]:
    """Return idle seconds per step and rank by cause."""
    idle: dict[str, float] = defaultdict(float)
    windows = list_windows(trace)
    for rank in trace.activity.ranks:
        start, end, count = windows[rank.rank]
        for cause, gaps in find_idle(trace, rank).items():
            (inside,) = measure_within(gaps, np.array([start]), np.array([end])).tolist()
            idle[cause] += inside / count / len(trace.ranks) / 1e9
    return dict(idle)


def _describe_differences(rows: list[DiffRow], trace: Trace, other: Trace) -> str:
    seconds, other_seconds = measure_step(trace), measure_step(other)
    here, there = format_seconds(seconds), format_seconds(other_seconds)
    percent = round(100 * (other_seconds / seconds - 1)) if seconds else 0
    change = f", {percent:+d} %" if percent else ""
    # Without marks of steps the seconds are those of the whole recording.
    wholes = ["step" if one.activity.has_steps else "recording" for one in (trace, other)]
    text = f"A {wholes[0]} takes {here} here and {there} in the other trace{change}."
    if wholes[0] != wholes[1]:
        text = (
            f"A {wholes[0]} takes {here} here, and a {wholes[1]} {there} in the other trace: steps are "
            "marked in one of them only."
        )
    named = [row for row in rows[:NUM_NAMED] if abs(row["difference_seconds"]) >= MIN_SHARE * seconds]
    if not named:
        return f"{text} No kernel, collective or gap differs by more than 1 % of the {wholes[0]}."
    parts = [
        f"{_name_row(row)} "
        f"{format_seconds(abs(row['difference_seconds']))} "
        f"{'more' if row['difference_seconds'] > 0 else 'less'}"
        for row in named
    ]
    return f"{text} Largest differences there: {', '.join(parts)}."


def _name_row(row: DiffRow) -> str:
    """Return the name of a row with its class: ``aten::mm (matmul)``, ``idle time (host-bound)``."""
    if row["kind"] == IDLE:
        return f"idle time ({'other cause' if row['name'] == OTHER else row['name']})"
    return f"{shorten_name(row['name'])} ({row['kind'].replace('_', '-')})"
