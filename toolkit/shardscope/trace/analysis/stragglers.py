"""Stragglers: ranks for which the others wait at collectives, by more than chance explains."""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, TypedDict, get_type_hints

import numpy as np
import numpy.typing as npt

from shardscope.timing.report import format_seconds
from shardscope.trace.analysis.collectives import find_collectives, list_step_seconds, measure_step
from shardscope.trace.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardscope.trace.analysis.collectives import Collectives
    from shardscope.trace.store import Trace

SIGNIFICANCE = 0.01
"""Largest p-value of a straggler, for all ranks together: one trace in 100 names one by chance."""
MIN_SHARE = 0.01
"""Minimum share of the step that a straggler costs: less is not worth a change."""
NUM_PERMUTATIONS = 1999
MIN_CALLS_OF_CERTAINTY = 30
"""With fewer calls, a delay that is likely by chance may still be a straggler's."""
MAX_PERMUTED_CALLS = 500
"""With more calls, the sum of their delays is close to a normal distribution."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class StragglerRow(TypedDict):
    """One rank's delay at collectives."""

    rank: int
    late_seconds: float
    """Time per step by which it arrives after the median of the other ranks, along the axis with the most."""
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
    collectives = collectives or find_collectives(trace)
    # One array for all groups of a size, because each is permuted thousands of times.
    by_size: dict[int, list[tuple[Ints, Floats]]] = defaultdict(list)
    by_axis: dict[tuple[int, ...], Floats] = defaultdict(lambda: np.zeros(len(trace.ranks)))
    numbers = np.array(trace.ranks)
    for ranks, durations in _measure_durations(trace, collectives):
        of_calls = _compute_delays(durations)
        by_size[len(ranks)].append((np.broadcast_to(ranks, durations.shape), of_calls))
        # Of numbers of ranks: with some missing, positions of tensor- and data-parallel ones differ alike.
        offsets = numbers[ranks] - numbers[ranks[0]]
        by_axis[tuple(offsets.tolist())][ranks] += of_calls.sum(axis=0)
    members = [np.concatenate([ranks for ranks, _ in groups]) for groups in by_size.values()]
    delays = [np.concatenate([delay for _, delay in groups]) for groups in by_size.values()]
    num_ranks, num_calls = len(trace.ranks), sum(len(delay) for delay in delays)
    late = _sum_by_rank(members, delays, num_ranks)
    p_values = _compute_p_values(members, delays, late) if num_calls else None
    steps, step_seconds = list_step_seconds(trace), measure_step(trace)
    rows: list[StragglerRow] = []
    # Each axis of the mesh shows the same delay: tensor-parallel ranks wait at every layer, and data-parallel
    # ones at the end for the sum of it.
    longest = np.max(list(by_axis.values()), axis=0) if by_axis else late
    for number, rank in enumerate(trace.ranks):
        late_seconds = float(longest[number]) / 1e9 / steps[rank][1]
        p_value = None if p_values is None else float(p_values[number])
        is_late = p_value is not None and p_value <= SIGNIFICANCE and late_seconds >= MIN_SHARE * step_seconds
        rows.append({"rank": rank, "late_seconds": late_seconds, "p_value": p_value, "is_straggler": is_late})
    kinds = frozenset(row["kind"] for row in collectives)
    text = _describe_stragglers(rows, num_calls, step_seconds, trace.activity.has_steps, kinds)
    return Stragglers(rows, text)


def _measure_durations(trace: Trace, collectives: Collectives) -> Iterator[tuple[Ints, Ints]]:
    """Yield the ranks of each group (as positions), and how long each of them is in each call.

    Of calls in flight together, such as DDP's buckets, a later one counts from the end of those before it:
    otherwise the time by which a rank is late would count once for each of them. A rank that waited in other
    groups before a call counts as there by so much earlier: it is late because of the rank it waited for.
    If more waits are unknown for some of the ranks than for others, none of them is earlier: only some would
    be.
    """
    by_call: dict[int, dict[int, int]] = defaultdict(dict)
    is_in_steps = trace.activity.is_in_steps
    for row, index in zip(collectives, collectives.slices, strict=True):
        if row["call"] >= 0 and is_in_steps[index]:
            by_call[row["call"]][row["rank"]] = index
    by_group: dict[tuple[int, ...], list[dict[int, int]]] = defaultdict(list)
    for of_ranks in by_call.values():
        if len(of_ranks) > 1:
            by_group[tuple(sorted(of_ranks))].append(of_ranks)
    waited = _sum_waits_before(trace, by_group, _list_waits(trace, collectives))
    for group, calls in by_group.items():
        slices = np.array([[of_ranks[rank] for rank in group] for of_ranks in calls])
        # One order for all ranks, by the first one's clock: they are compared in the same part of each call.
        slices = slices[np.argsort(trace.start_ns[slices[:, 0]], kind="stable")]
        start, end = trace.start_ns[slices], trace.activity.end_ns[slices]
        start[1:] = np.maximum(start[1:], np.maximum.accumulate(end, axis=0)[:-1])
        positions = np.array([trace.ranks.index(rank) for rank in group])
        before = np.array([[waited[index] for index in of_ranks] for of_ranks in slices.tolist()], np.int64)
        known, num_unknown = before[..., 0], before[..., 1]
        is_comparable = num_unknown.min(axis=1, keepdims=True) == num_unknown.max(axis=1, keepdims=True)
        yield positions, np.maximum(end - start, 0) + is_comparable * known


def _list_waits(trace: Trace, collectives: Collectives) -> dict[int, int | None]:
    """Return for how long each call's rank waited for the others of its group; None if that is unknown."""
    rows = [
        (row, index)
        for row, index in zip(collectives, collectives.slices, strict=True)
        if trace.activity.is_in_steps[index]
    ]
    num_callers = Counter(row["call"] for row, _ in rows)
    # Sends and receives of more than two stages cannot be paired. Then those of no rank count.
    are_paired = all(row["call"] >= 0 for row, _ in rows if row["kind"] == "send_recv")
    waits: dict[int, int | None] = {}
    for row, index in rows:
        # What compute overlaps delays nothing.
        wait = round(min(row["skew_seconds"] or 0.0, row["exposed_seconds"]) * 1e9)
        is_complete = row["call"] >= 0 and num_callers[row["call"]] >= row["group_size"]
        if row["kind"] == "send_recv":
            waits[index] = wait if are_paired else 0
        elif is_complete or row["group_size"] == 1 or not row["exposed_seconds"]:
            waits[index] = wait
        else:
            waits[index] = None
    return waits


def _sum_waits_before(
    trace: Trace, by_group: Mapping[tuple[int, ...], list[dict[int, int]]], waits: Mapping[int, int | None]
) -> dict[int, tuple[int, int]]:
    """Return for how long each call's rank waited in other groups since its previous call in this group.

    The second number is that of waits of unknown length.
    """
    groups = {
        index: group for group, calls in by_group.items() for of_ranks in calls for index in of_ranks.values()
    }
    of_rank: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for index in waits:
        of_rank[trace.tracks[trace.track_index[index]].rank].append((int(trace.start_ns[index]), index))
    waited: dict[int, tuple[int, int]] = {}
    for rank_calls in of_rank.values():
        total, num_unknown = 0, 0
        after = dict.fromkeys(by_group, (0, 0))
        in_flight: list[tuple[int, int]] = []
        for start, index in sorted(rank_calls):
            while in_flight and in_flight[0][0] <= start:
                _, ended = heapq.heappop(in_flight)
                wait = waits[ended]
                total, num_unknown = total + (wait or 0), num_unknown + (wait is None)
                if ended in groups:
                    after[groups[ended]] = (total, num_unknown)
            heapq.heappush(in_flight, (int(trace.activity.end_ns[index]), index))
            if index in groups:
                total_before, unknown_before = after[groups[index]]
                waited[index] = total - total_before, num_unknown - unknown_before
    return waited


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
    rows: list[StragglerRow],
    num_calls: int,
    step_seconds: float,
    has_steps: bool,
    kinds: frozenset[str],
) -> str:
    if not num_calls:
        return f"Stragglers: unknown, {_explain_unknown(len(rows), kinds)}"
    calls = "1 collective" if num_calls == 1 else f"{num_calls:,} collectives"
    latest_first = sorted(rows, key=lambda row: -row["late_seconds"])
    stragglers = [row for row in latest_first if row["is_straggler"]]
    if stragglers:
        parts = [
            f"{_describe_delay(row, step_seconds, has_steps)}, by chance: {format_chance(row['p_value'])})"
            for row in stragglers
        ]
        return f"Stragglers: {', '.join(parts)}."
    latest = latest_first[0]
    if latest["late_seconds"] <= MIN_SHARE * step_seconds:
        whole = "step" if has_steps else "recording"
        return f"Stragglers: none. At {calls} no rank is later than the others by 1 % of the {whole}."
    chance = format_chance(latest["p_value"])
    delay = _describe_delay(latest, step_seconds, has_steps).capitalize()
    by_chance = f"at {calls} one of equally fast ranks would be as late by chance in {chance} of recordings."
    # At a few collectives any delay may be chance. At many, more steps would not change the answer.
    if num_calls >= MIN_CALLS_OF_CERTAINTY and (latest["p_value"] or 0.0) >= 0.5:
        return f"Stragglers: none. {delay}), as expected: {by_chance}"
    return f"Stragglers: none that is certain. {delay}), but {by_chance} Record more steps to be sure."


def _explain_unknown(num_ranks: int, kinds: frozenset[str]) -> str:
    """Return why ranks cannot be compared, and how to record a trace in which they can."""
    if num_ranks < 2:
        return "one rank alone cannot be compared. Load the folder with the files of all ranks."
    if kinds == {"send_recv"}:
        return "only sends and receives were recorded, which ranks do not leave together."
    if kinds:
        return "no collective was recorded on several ranks. Record the same steps on all ranks."
    return (
        "no collective was recorded. torch.profiler records those of GPUs with ProfilerActivity.CUDA, and "
        "gloo's with ProfilerActivity.CPU."
    )


def _describe_delay(row: StragglerRow, step_seconds: float, has_steps: bool) -> str:
    """Return a rank's delay, with a bracket that is left open."""
    share = 100 * row["late_seconds"] / step_seconds
    per_step, whole = ("a step", "step") if has_steps else ("in all", "recording")
    return (
        f"rank {row['rank']} arrives {format_seconds(row['late_seconds'])} {per_step} after the others "
        f"({share:.0f} % of the {whole}"
    )


def format_chance(p_value: float | None) -> str:
    """Return a p-value in percent: ``47 %``, ``0.05 %``."""
    return "unknown" if p_value is None else f"{100 * p_value:.2g} %" if p_value < 0.995 else "100 %"
