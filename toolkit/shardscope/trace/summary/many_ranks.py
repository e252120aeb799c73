"""Summary of many ranks, read one at a time, in the memory of a few."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardscope.timing.report import format_seconds
from shardscope.trace.analysis.collectives import measure_step
from shardscope.trace.summary.summary import (
    NUM_OPERATORS,
    RankTimes,
    Sentence,
    TraceSummary,
    list_rank_times,
    sum_operators,
    summarize,
)
from shardscope.trace.table import Table
from shardscope.trace.tiles import NameTotals

if TYPE_CHECKING:
    from shardscope.trace.store import Trace

MAX_TOGETHER = 32
"""Maximum number of ranks that a summary reads together."""
NUM_COMPARED = 8
"""Number of ranks that the sentences about more ranks compare."""
MAX_COMPARED_SLICES = 2_000_000
"""Maximum slices of the compared ranks together, about 300 MB; two ranks are compared in any case."""
MAX_NAMES = 200
"""Maximum number of names that one rank adds to the sums over all."""


def summarize_many(trace: Trace) -> TraceSummary:
    """Return the summary of ``trace``, with the times of every rank.

    The sentences compare the ranks with the most and the least work of their own, and some between. Steps of
    ranks that wait for each other take the same time on all of them: a straggler is the one that never waits.
    """
    rows: list[RankTimes] = []
    steps: dict[int, float] = {}
    own: dict[int, float] = {}
    totals: dict[str, NameTotals] = {}
    largest = 1
    for number in trace.ranks:
        measured_rank = _measure_rank(trace, number)
        rows += measured_rank.rows
        steps[number] = measured_rank.step_seconds
        own[number] = measured_rank.own_seconds
        largest = max(largest, measured_rank.num_slices)
        _add_totals(totals, measured_rank.operators)
    compared = choose_ranks(own, MAX_COMPARED_SLICES // largest)
    some = trace.select_ranks(compared)
    some.cut_off = trace.cut_off  # the tables are of all ranks
    sentences = list(summarize(some).findings)
    measured = {rank: seconds for rank, seconds in steps.items() if seconds} or steps
    slowest, fastest = max(measured, key=measured.__getitem__), min(measured, key=measured.__getitem__)
    shortest, longest = format_seconds(steps[fastest]), format_seconds(steps[slowest])
    times = f"take {shortest} on rank {fastest} to {longest} on rank {slowest}"
    if shortest == longest:
        times = f"take {longest} on all of them"
    chosen = "wait most and least for others"
    if all(own[rank] == steps[rank] for rank in steps):
        chosen = "have the longest and shortest steps"  # no collective delays any
    text = (
        f"{len(trace.ranks):,} ranks: steps {times}. The table has all of them; the sentences below "
        f"compare ranks {', '.join(map(str, compared))}. They are those that {chosen}, and some between."
    )
    first = Sentence(text=text)
    operators = sorted(totals.values(), key=lambda row: -row["self_seconds"])[:NUM_OPERATORS]
    return TraceSummary(findings=(first, *sentences), ranks=Table(rows), operators=Table(operators))


@dataclass(frozen=True, kw_only=True)
class _MeasuredRank:
    rows: list[RankTimes]
    step_seconds: float
    own_seconds: float
    """Seconds of a step without exposed communication, in which the rank may wait for others."""
    operators: list[NameTotals]
    num_slices: int


def _measure_rank(trace: Trace, number: int) -> _MeasuredRank:
    """Read one rank. Its columns, and what is derived from them, are freed with the trace of it alone."""
    alone = trace.select_ranks([number])
    try:
        rows, step_seconds = list_rank_times(alone), measure_step(alone)
        waits = sum(row["exposed_communication_seconds"] / (row["span_seconds"] or 1.0) for row in rows)
        return _MeasuredRank(
            rows=rows,
            step_seconds=step_seconds,
            own_seconds=step_seconds * (1.0 - waits),
            operators=sum_operators(alone)[:MAX_NAMES],
            num_slices=len(alone),
        )
    finally:
        alone.release()


def choose_ranks(seconds: Mapping[int, float], limit: int = NUM_COMPARED) -> list[int]:
    """Return the ranks with the most and the least seconds, and some between.

    They are up to ``limit`` and up to :data:`NUM_COMPARED`, but at least two.
    """
    by_time = sorted(seconds, key=seconds.__getitem__)
    last = len(by_time) - 1
    count = min(max(limit, 2), NUM_COMPARED)
    positions = {round(number * last / (count - 1)) for number in range(count)}
    return sorted(by_time[position] for position in positions)


def _add_totals(totals: dict[str, NameTotals], rows: Iterable[NameTotals]) -> None:
    for row in rows:
        known = totals.get(row["name"])
        if known is None:
            totals[row["name"]] = row
            continue
        known["slices"] += row["slices"]
        known["self_seconds"] += row["self_seconds"]
        known["total_seconds"] += row["total_seconds"]
