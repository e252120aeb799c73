"""Summary of many ranks, read one at a time, in the memory of a few."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from shardscope.timing.report import format_seconds
from shardscope.trace.analysis.diff import measure_step
from shardscope.trace.analysis.summary import (
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
MAX_NAMES = 200
"""Maximum number of names that one rank adds to the sums over all."""


def summarize_many(trace: Trace) -> TraceSummary:
    """Return the summary of ``trace``, with the times of every rank.

    The sentences compare the ranks with the longest and the shortest step and some between.
    """
    rows: list[RankTimes] = []
    steps: dict[int, float] = {}
    totals: dict[str, NameTotals] = {}
    for rank in trace.ranks:
        alone = trace.select_ranks([rank])
        rows += list_rank_times(alone)
        steps[rank] = measure_step(alone)
        _add_totals(totals, sum_operators(alone)[:MAX_NAMES])
        alone.release()
    compared = choose_ranks(steps)
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


def choose_ranks(steps: dict[int, float]) -> list[int]:
    """Return up to :data:`NUM_COMPARED` ranks: those with the longest and shortest steps, and between."""
    by_time = sorted(steps, key=steps.__getitem__)
    last = len(by_time) - 1
    positions = {round(number * last / (NUM_COMPARED - 1)) for number in range(NUM_COMPARED)}
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
