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
"""Number of ranks that the sentences about more ranks compare: the slowest, the fastest and some between."""
MAX_COMPARED_SLICES = 2_000_000
"""Maximum slices of the compared ranks together, about 300 MB; two ranks are compared in any case."""
MAX_NAMES = 200
"""Maximum number of names that one rank adds to the sums over all."""


def summarize_many(trace: Trace) -> TraceSummary:
    """Return the summary of ``trace``, with the times of every rank.

    The sentences compare the ranks with the longest and the shortest step and some between.
    """
    rows: list[RankTimes] = []
    steps: dict[int, float] = {}
    totals: dict[str, NameTotals] = {}
    largest = 1
    for number in trace.ranks:
        measured_rank = _measure_rank(trace, number)
        rows += measured_rank.rows
        steps[number] = measured_rank.step_seconds
        largest = max(largest, measured_rank.num_slices)
        _add_totals(totals, measured_rank.operators)
    compared = choose_ranks(steps, MAX_COMPARED_SLICES // largest)
    sentences = list(summarize(trace.select_ranks(compared)).findings)
    measured = {rank: seconds for rank, seconds in steps.items() if seconds} or steps
    slowest, fastest = max(measured, key=measured.__getitem__), min(measured, key=measured.__getitem__)
    text = (
        f"{len(trace.ranks):,} ranks: steps take {format_seconds(steps[fastest])} on rank {fastest} to "
        f"{format_seconds(steps[slowest])} on rank {slowest}. The table has all of them; the sentences below "
        f"compare ranks {', '.join(map(str, compared))}."
    )
    first = Sentence(text=text)
    operators = sorted(totals.values(), key=lambda row: -row["self_seconds"])[:NUM_OPERATORS]
    return TraceSummary(findings=(first, *sentences), ranks=Table(rows), operators=Table(operators))


@dataclass(frozen=True, kw_only=True)
class _MeasuredRank:
    rows: list[RankTimes]
    step_seconds: float
    operators: list[NameTotals]
    num_slices: int


def _measure_rank(trace: Trace, number: int) -> _MeasuredRank:
    """Read one rank. Its columns, and what is derived from them, are freed with the trace of it alone."""
    alone = trace.select_ranks([number])
    try:
        return _MeasuredRank(
            rows=list_rank_times(alone),
            step_seconds=measure_step(alone),
            operators=sum_operators(alone)[:MAX_NAMES],
            num_slices=len(alone),
        )
    finally:
        alone.release()


def choose_ranks(steps: Mapping[int, float], limit: int = NUM_COMPARED) -> list[int]:
    """Return the ranks with the longest and shortest steps, and some between.

    They are up to ``limit`` and up to :data:`NUM_COMPARED`, but at least two.
    """
    by_time = sorted(steps, key=steps.__getitem__)
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
