"""Stragglers: ranks for which the others wait at collectives, by more than chance explains."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, TypedDict, get_type_hints

import numpy as np
import numpy.typing as npt

from shardscope.timing.report import format_seconds
from shardscope.trace.analysis.collectives import find_collectives, list_durations, list_step_seconds
from shardscope.trace.table import Table

if TYPE_CHECKING:
    from shardscope.trace.analysis.collectives import Collectives
    from shardscope.trace.store import Trace

SIGNIFICANCE = 0.01
"""Largest p-value of a straggler, for all ranks together: one trace in 100 names one by chance."""
MIN_SHARE = 0.01
"""Minimum share of the step that a straggler costs: less is not worth a change."""
NUM_PERMUTATIONS = 1999
MAX_PERMUTED_CALLS = 500
"""With more calls, the sum of their delays is close to a normal distribution."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class StragglerRow(TypedDict):
    """One rank's delay at collectives."""

    rank: int
    late_seconds: float
    """Time per step by which it arrives after the median of the other ranks."""
    p_value: float | None
    """Probability that any of equally fast ranks would be as late; None if nothing can be compared."""
    is_straggler: bool


class Stragglers(Table[StragglerRow]):
    """The delay of each rank, and the verdict as a sentence."""

    def __init__(self, rows: list[StragglerRow], text: str) -> None:
        super().__init__(rows, tuple(get_type_hints(StragglerRow)))
        self.text = text
        """Sentence that names the stragglers, or says that there are none."""


def find_stragglers(trace: Trace, collectives: Collectives | None = None) -> Stragglers:
    """Return one row per rank; see :meth:`Trace.stragglers`. Pass ``collectives`` if already found.

    A rank that arrives last at a collective has the shortest duration there, so no common clock is needed. If
    ranks are equally fast, each call's delays could as well belong to the ranks in any other order: shuffling
    them within each call gives the distribution of the largest delay among ranks, against which each rank is
    compared (Westfall and Young 1993, maxT).
    """
    durations = list_durations(collectives or find_collectives(trace))
    position = {rank: number for number, rank in enumerate(trace.ranks)}
    # Calls of groups of one size are one matrix: a row per call, a column per rank of the group.
    by_size: dict[int, list[dict[int, int]]] = defaultdict(list)
    for of_ranks in durations.values():
        by_size[len(of_ranks)].append(of_ranks)
    members = [np.array([[position[rank] for rank in call] for call in calls]) for calls in by_size.values()]
    delays = [
        _compute_delays(np.array([list(call.values()) for call in calls])) for calls in by_size.values()
    ]
    num_ranks = len(trace.ranks)
    late = _sum_by_rank(members, delays, num_ranks)
    p_values = _compute_p_values(members, delays, late) if durations else None
    steps = list_step_seconds(trace)
    rows: list[StragglerRow] = []
    for number, rank in enumerate(trace.ranks):
        seconds, num_steps = steps[rank]
        late_seconds = float(late[number]) / 1e9 / num_steps
        p_value = None if p_values is None else float(p_values[number])
        is_late = p_value is not None and p_value <= SIGNIFICANCE and late_seconds >= MIN_SHARE * seconds
        rows.append({"rank": rank, "late_seconds": late_seconds, "p_value": p_value, "is_straggler": is_late})
    return Stragglers(rows, _describe_stragglers(rows, len(durations), steps, trace.activity.has_steps))


def _compute_delays(durations: Ints) -> Floats:
    """Return by how much each rank arrived after the lower median of the others; rows are calls.

    The median of the others, not the first one, so that one early rank does not make all others stragglers.
    """
    num_calls, num_ranks = durations.shape
    order = np.argsort(-durations, axis=1, kind="stable")  # longest first: first to arrive
    arrival = np.empty_like(order)
    np.put_along_axis(arrival, order, np.broadcast_to(np.arange(num_ranks), order.shape).copy(), axis=1)
    sorted_durations = np.take_along_axis(durations, order, axis=1)
    # The lower median of the n - 1 others is at (n - 2) // 2 among them; skip the rank itself.
    middle = (num_ranks - 2) // 2
    position = np.where(arrival <= middle, middle + 1, middle)
    median = np.take_along_axis(sorted_durations, position, axis=1)
    assert median.shape == (num_calls, num_ranks)
    return np.asarray(np.maximum(median - durations, 0), np.float64)


def _sum_by_rank(members: list[Ints], delays: list[Floats], num_ranks: int) -> Floats:
    total = np.zeros(num_ranks)
    for ranks, delay in zip(members, delays, strict=True):
        total += np.bincount(ranks.ravel(), weights=delay.ravel(), minlength=num_ranks)
    return total


def _compute_p_values(members: list[Ints], delays: list[Floats], late: Floats) -> Floats:
    """Return for each rank the probability that the latest of equally fast ranks is at least as late."""
    num_ranks = len(late)
    if sum(len(delay) for delay in delays) > MAX_PERMUTED_CALLS:
        return _approximate_p_values(members, delays, late)
    random = np.random.default_rng(0)  # the same trace gives the same answer
    at_least = np.ones(num_ranks)
    for _ in range(NUM_PERMUTATIONS):
        shuffled = [random.permuted(delay, axis=1) for delay in delays]
        # A sum in another order may differ in the last bit.
        at_least += _sum_by_rank(members, shuffled, num_ranks).max() >= late * (1 - 1e-12)
    return at_least / (NUM_PERMUTATIONS + 1)


def _approximate_p_values(members: list[Ints], delays: list[Floats], late: Floats) -> Floats:
    """Return the same by a normal approximation, times the number of ranks (Bonferroni)."""
    num_ranks = len(late)
    mean = [np.broadcast_to(delay.mean(axis=1, keepdims=True), delay.shape) for delay in delays]
    variance = [np.broadcast_to(delay.var(axis=1, keepdims=True), delay.shape) for delay in delays]
    expected, spread = (_sum_by_rank(members, values, num_ranks) for values in (mean, variance))
    deviations = (late - expected) / np.sqrt(np.maximum(spread, 1e-30))
    tails = np.array([0.5 * math.erfc(value / math.sqrt(2)) for value in deviations.tolist()])
    return np.asarray(np.minimum(tails * num_ranks, 1.0), np.float64)


def _describe_stragglers(
    rows: list[StragglerRow], num_calls: int, steps: dict[int, tuple[float, int]], has_steps: bool
) -> str:
    if not num_calls:
        return (
            "Stragglers: unknown, one rank alone cannot be compared."
            if len(rows) < 2
            else "Stragglers: unknown, no collective was recorded on several ranks."
        )
    calls = "1 collective" if num_calls == 1 else f"{num_calls:,} collectives"
    latest_first = sorted(rows, key=lambda row: -row["late_seconds"])
    stragglers = [row for row in latest_first if row["is_straggler"]]
    if stragglers:
        parts = [
            f"{_describe_delay(row, steps, has_steps)}, by chance: {format_chance(row['p_value'])})"
            for row in stragglers
        ]
        return f"Stragglers: {', '.join(parts)}."
    latest = latest_first[0]
    if latest["late_seconds"] < MIN_SHARE * steps[latest["rank"]][0]:
        whole = "step" if has_steps else "recording"
        return f"Stragglers: none. At {calls} no rank is later than the others by 1 % of the {whole}."
    chance = format_chance(latest["p_value"])
    return (
        f"Stragglers: none that is certain. {_describe_delay(latest, steps, has_steps).capitalize()}), but "
        f"at {calls} one of equally fast ranks would be as late by chance in {chance} of recordings. Record "
        "more steps to be sure."
    )


def _describe_delay(row: StragglerRow, steps: dict[int, tuple[float, int]], has_steps: bool) -> str:
    """Return a rank's delay, with a bracket that is left open."""
    share = 100 * row["late_seconds"] / steps[row["rank"]][0]
    per_step, whole = ("a step", "step") if has_steps else ("in all", "recording")
    return (
        f"rank {row['rank']} arrives {format_seconds(row['late_seconds'])} {per_step} after the others "
        f"({share:.0f} % of the {whole}"
    )


def format_chance(p_value: float | None) -> str:
    """Return a p-value in percent: ``47 %``, ``0.05 %``."""
    return "unknown" if p_value is None else f"{100 * p_value:.2g} %" if p_value < 0.995 else "100 %"
