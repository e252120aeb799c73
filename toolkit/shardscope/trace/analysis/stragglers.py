"""Stragglers: ranks for which the others wait at collectives, by more than chance explains."""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from functools import cached_property
from operator import add
from typing import TYPE_CHECKING, NamedTuple, TypedDict, get_type_hints

import numpy as np
import numpy.typing as npt

from shardscope.core.number_format import format_count
from shardscope.timing.report import format_seconds
from shardscope.trace.analysis.collectives import (
    find_collectives,
    list_step_seconds,
    measure_step,
    measure_waits,
    measure_waits_before,
)
from shardscope.trace.analysis.intervals import Mask
from shardscope.trace.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardscope.trace.analysis.collectives import CollectiveRow, Collectives
    from shardscope.trace.store import Trace

SIGNIFICANCE = 0.01
"""Largest p-value of a straggler, for all ranks together: one trace in 100 names one by chance."""
MIN_SHARE = 0.01
"""Minimum share of the step that a straggler costs: less is not worth a change."""
NUM_PERMUTATIONS = 1999
MIN_CALLS_OF_CERTAINTY = 30
"""With fewer calls, a delay that is likely by chance may still be a straggler's."""
_AFTER_ALL = 2**63
QUEUE_GAP_NS = 10_000
"""A collective that begins within this time of the end of another one of its group was queued behind it."""
MAX_NAMED = 4
"""Number of stragglers with figures in the sentence: a stage of a pipeline may have hundreds of ranks."""
MAX_PERMUTED_CALLS = 500
"""With more calls, the sum of their delays is close to a normal distribution."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class StragglerRow(TypedDict):
    """One rank's delay at collectives."""

    rank: int
    late_seconds: float
    """Time per step by which it arrives after the median of the other ranks, along the axis with the most.
    Of a straggler, along those that show it. In a pipeline, the time for which its own work takes longer."""
    p_value: float | None
    """Probability that any of equally fast ranks would be as late; None if nothing can be compared."""
    is_straggler: bool


class Stragglers(Table[StragglerRow]):
    """The delay of each rank, and the verdict as a sentence."""

    def __init__(self, rows: list[StragglerRow], text: str) -> None:
        super().__init__(rows, tuple(get_type_hints(StragglerRow)), text=text)


def find_stragglers(trace: Trace, collectives: Collectives | None = None) -> Stragglers:
    """Return one row per rank; see :meth:`Trace.stragglers`. Pass ``collectives`` if already found.

    A rank that arrives last at a collective has the shortest duration there, so no common clock is needed. If
    ranks are equally fast, each call's delays could as well belong to the ranks in any other order: shuffling
    them within each call gives the distribution of the largest delay among ranks, against which each rank is
    compared (Westfall and Young 1993, maxT).
    """
    collectives = collectives or find_collectives(trace)
    # Delays as far as is known, with all waits in them, with the longest possible waits taken off, and those
    # of collectives before which all waits are known.
    measured, uncorrected, least, certain = (_Delays(trace.ranks) for _ in range(4))
    is_all_certain = True
    groups = list(_measure_durations(trace, collectives))
    # Stages wait at messages by the schedule, whichever is slow: other calls of the same ranks tell more.
    others = [set(ranks.tolist()) for ranks, of_calls in groups if not of_calls.is_message]
    for ranks, of_calls in groups:
        if of_calls.is_message and any(other.issuperset(ranks.tolist()) for other in others):
            continue
        delays = _compute_delays(of_calls.corrected)
        measured.add(ranks, delays)
        least.add(ranks, _compute_delays(of_calls.corrected, of_calls.longest))
        is_certain = ~of_calls.is_uncertain
        if not of_calls.is_message:
            certain.add(ranks, delays[is_certain])
        is_all_certain = is_all_certain and bool(is_certain.all())
        uncorrected.add(ranks, np.where(is_certain[:, None], delays, _compute_delays(of_calls.plain)))
    steps, step_seconds = list_step_seconds(trace), measure_step(trace)
    min_ns = {rank: MIN_SHARE * step_seconds * 1e9 * steps[rank][1] for rank in trace.ranks}

    def make_row(rank: int, delay: _Delay) -> StragglerRow:
        return {
            "rank": rank,
            "late_seconds": delay.ns / 1e9 / steps[rank][1],
            "p_value": delay.p_value,
            "is_straggler": delay.is_late,
        }

    rows: list[StragglerRow] = []
    uncertain: dict[int, StragglerRow] = {}
    for number, rank in enumerate(trace.ranks):
        # The part that is not certain may be waits for ranks that were not recorded.
        delay = measured.measure(number, min_ns[rank], least)
        if not is_all_certain and not delay.is_late:
            # Calls of which all is known may be enough to tell.
            known = certain.measure(number, min_ns[rank])
            delay = known if known.is_late else delay
        rows.append(make_row(rank, delay))
        if not is_all_certain and not delay.is_late:
            delay = uncorrected.measure(number, min_ns[rank])
            if delay.is_late:
                uncertain[rank] = make_row(rank, delay._replace(is_late=False))
    if uncertain and not any(row["is_straggler"] for row in rows):
        latest = max(uncertain.values(), key=lambda row: row["late_seconds"])
        rows = [uncertain.get(row["rank"], row) for row in rows]
        return Stragglers(rows, _describe_uncertain(trace, latest, step_seconds))
    kinds = frozenset(row["kind"] for row in collectives)
    text = _describe_stragglers(rows, measured.num_calls, step_seconds, trace.activity.has_steps, kinds)
    return Stragglers(rows, text)


class _Delay(NamedTuple):
    """One rank's delay in all steps."""

    ns: float
    p_value: float | None
    """Probability that any of equally fast ranks is so late; None without calls."""
    is_late: bool


class _Delays:
    """Delays of all ranks in calls of all groups.

    Each axis of the mesh shows the same delay: tensor-parallel ranks wait at every layer, and data-parallel
    ones at the end for the sum of it. A rank's delay is that along the axis with the most of it.
    """

    def __init__(self, ranks: list[int]) -> None:
        self._numbers = np.array(ranks)
        self._by_axis: dict[tuple[int, ...], list[tuple[Ints, Floats]]] = defaultdict(list)

    def add(self, ranks: Ints, of_calls: Floats) -> None:
        """Add the calls of a group; ``ranks`` are positions, and rows of ``of_calls`` are calls."""
        # Of numbers of ranks: with some missing, positions of tensor- and data-parallel ones differ alike.
        offsets = self._numbers[ranks] - self._numbers[ranks[0]]
        self._by_axis[tuple(offsets.tolist())].append((np.broadcast_to(ranks, of_calls.shape), of_calls))

    @cached_property
    def _axes(self) -> list[tuple[Ints, Floats]]:
        """Ranks and delays along each axis: one array, because each is permuted thousands of times."""
        return [
            (np.concatenate([ranks for ranks, _ in groups]), np.concatenate([delay for _, delay in groups]))
            for groups in self._by_axis.values()
        ]

    @cached_property
    def num_calls(self) -> int:
        """Number of calls."""
        return sum(len(of_calls) for _, of_calls in self._axes)

    @cached_property
    def by_axis(self) -> Floats:
        """Delay of each rank (columns) along each axis (rows)."""
        return _sum_by_axis(self._axes, len(self._numbers))

    def measure(self, number: int, min_ns: float, least: _Delays | None = None) -> _Delay:
        """Return a rank's delay along the axis with the most of it; of those that make it late, if any do.

        An axis does if the delay is at least ``min_ns``, at least half of it is in ``least``, too, and it is
        more than chance explains. Delays along others may be longer: stages wait for each other in turns.
        """
        if not self.num_calls:
            return _Delay(0.0, None, False)
        along, p_values = self.by_axis[:, number], self._p_values[:, number]
        is_late = (p_values <= SIGNIFICANCE) & (
            (least or self).by_axis[:, number] >= np.maximum(min_ns, along / 2)
        )
        is_shown = is_late if is_late.any() else along >= along.max() / 2
        return _Delay(float(along[is_shown].max()), float(p_values[is_shown].min()), bool(is_late.any()))

    @cached_property
    def _p_values(self) -> Floats:
        return _compute_p_values(self._axes, self.by_axis)


class _Durations(NamedTuple):
    """Durations of a group's calls, in nanoseconds, shape ``(calls, ranks)``."""

    plain: Ints
    """Without what it waited before; in a complete pipeline, with the time of its messages."""
    corrected: Ints
    """With the time for which the rank waited in other groups before."""
    longest: Ints
    """With the longest time for which it may have waited."""
    is_uncertain: Mask
    """Whether some of that is not known, by call."""
    is_message: bool
    """Whether the calls are sends and their receives. Stages wait there by the schedule, each at other calls
    of a step: a part of these calls says nothing."""


class _Wait(NamedTuple):
    """For how long a rank waited for the others of its group, in nanoseconds."""

    known: int = 0
    estimated: int = 0
    """Wait for ranks that were not recorded, by the transfer time of the same call in other groups."""
    possible: int = 0
    """Upper bound, if nothing is known."""
    num_unknown: int = 0
    num_estimated: int = 0
    messages: int = 0
    """Time of sends and receives, which each rank's own file has."""

    def plus(self, other: _Wait) -> _Wait:
        return _Wait(*map(add, self, other))


def _measure_durations(trace: Trace, collectives: Collectives) -> Iterator[tuple[Ints, _Durations]]:
    """Yield the ranks of each group (as positions), and how long each of them is in each call.

    A rank that waited in other groups before a call counts as there by so much earlier: it is late because of
    the rank it waited for. If more waits are unknown for some of the ranks than for others, none of them is
    earlier: only some would be.
    """
    by_call: dict[int, dict[int, int]] = defaultdict(dict)
    is_in_steps = trace.activity.is_in_steps
    messages: set[int] = set()
    exposed: dict[int, int] = {}
    for row, index in zip(collectives, collectives.slices, strict=True):
        exposed[index] = round(row["exposed_seconds"] * 1e9)
        if row["call"] >= 0 and is_in_steps[index]:
            by_call[row["call"]][row["rank"]] = index
            if row["kind"] == "send_recv":
                messages.add(index)
    by_group: dict[tuple[tuple[int, ...], bool], list[dict[int, int]]] = defaultdict(list)
    for of_ranks in by_call.values():
        if len(of_ranks) > 1:
            by_group[tuple(sorted(of_ranks)), min(of_ranks.values()) in messages].append(of_ranks)
    is_complete = trace.world_size <= len(trace.ranks)
    waited = _sum_waits(trace, _list_waits(trace, collectives))
    for (group, is_message), calls in by_group.items():
        slices = np.array([[of_ranks[rank] for rank in group] for of_ranks in calls])
        # One order for all ranks, by the first one's clock: they are compared in the same part of each call.
        slices = slices[np.argsort(trace.start_ns[slices[:, 0]], kind="stable")]
        positions = np.array([trace.ranks.index(rank) for rank in group])
        # Since the previous call of the group: waits before calls in flight together count once, too.
        totals = np.array([[waited[index] for index in of_ranks] for of_ranks in slices.tolist()], np.int64)
        before, at_end = totals[:, :, 0], totals[:, :, 1]
        before[1:] -= np.maximum.accumulate(at_end, axis=0)[:-1]
        before = np.maximum(before, 0)
        known, estimated, possible, num_unknown, num_estimated, of_messages = np.moveaxis(before, -1, 0)
        is_comparable = num_unknown.min(axis=1, keepdims=True) == num_unknown.max(axis=1, keepdims=True)
        if is_message:
            # A receive may begin long before its stage needs it, which makes no stage early: waiting counts.
            waits = [[exposed[index] for index in of_ranks] for of_ranks in slices.tolist()]
            inside = np.array(waits, np.int64)
        else:
            inside = _measure_new_leads(trace, positions, slices)
        own = inside + of_messages
        yield (
            positions,
            _Durations(
                # A peer that was not recorded may be why its stages waited: then no rank is slow for certain.
                plain=own if is_complete else inside,
                corrected=own + is_comparable * (known + estimated),
                longest=own + known + estimated + possible,
                is_uncertain=np.any(num_unknown + num_estimated > 0, axis=1),
                is_message=is_message,
            ),
        )


def _measure_new_leads(trace: Trace, positions: Ints, slices: Ints) -> Ints:
    """Return for how long each rank waited in each call, without the time by which it was early before.

    A rank that is early stays so until it waits, and it does not wait while it computes: at each of DDP's
    buckets the others are late by the same time, which counts once.
    """
    start, end = trace.start_ns[slices], trace.activity.end_ns[slices]
    ranks = [trace.activity.ranks[position] for position in positions.tolist()]
    waited = np.array([measure_waits_before(trace, *one) for one in zip(ranks, slices.T, strict=True)]).T
    is_queued = np.array([_find_queued(*one) for one in zip(start.T, end.T, strict=True)]).T
    # Without the transfer, in which all ranks are: it makes none of them early.
    inside, waits = end - start, np.diff(waited, axis=0)
    inside -= inside.min(axis=1, keepdims=True)
    waits -= waits.min(axis=1, keepdims=True)
    lead = inside[:1].sum(axis=0)
    for number in range(1, len(slices)):
        lead = np.maximum(lead - waits[number - 1], 0)
        # The rank may have been there earlier, and its call queued behind another one.
        new = np.maximum(inside[number], lead * is_queued[number])
        inside[number], lead = new - lead, new
    return inside


def _find_queued(start: Ints, end: Ints) -> Mask:
    """Return which of a rank's calls begin where another one ends."""
    ends = np.sort(end)
    since = start - ends[np.searchsorted(ends, start, side="right") - 1]
    return np.asarray((since >= 0) & (since <= QUEUE_GAP_NS))


def _list_waits(trace: Trace, collectives: Collectives) -> dict[int, _Wait]:
    """Return for how long each call's rank waited for the others of its group."""
    idle_ns = dict(zip(collectives.slices, measure_waits(trace, collectives.slices).tolist(), strict=True))
    rows = [
        (row, index)
        for row, index in zip(collectives, collectives.slices, strict=True)
        if trace.activity.is_in_steps[index]
    ]
    num_callers = Counter(row["call"] for row, _ in rows)
    waits: dict[int, _Wait] = {}
    incomplete: list[tuple[CollectiveRow, int]] = []
    transfers: dict[tuple[str, int | None, int], list[float]] = defaultdict(list)
    for row, index in rows:
        # What compute overlaps delays nothing.
        wait = _Wait(min(round((row["skew_seconds"] or 0.0) * 1e9), idle_ns[index]))
        is_complete = row["call"] >= 0 and num_callers[row["call"]] >= row["group_size"]
        if row["kind"] == "send_recv":
            # The first stage of a pipeline is the last to end a step, by the schedule. All time of messages
            # counts as waits, whichever peer they are for, so that the rest of a step is a stage's own work.
            waits[index] = _Wait(messages=idle_ns[index])
        elif is_complete or row["group_size"] == 1 or not idle_ns[index]:
            waits[index] = wait
        else:
            incomplete.append((row, index))
        if is_complete and row["num_bytes"] is not None and row["transfer_seconds"] is not None:
            transfers[row["kind"], row["num_bytes"], row["group_size"]].append(row["transfer_seconds"])
    usual = {key: float(np.median(seconds)) for key, seconds in transfers.items()}
    unknown: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for row, index in incomplete:
        transfer = usual.get((row["kind"], row["num_bytes"], row["group_size"]))
        if transfer is None:
            unknown[row["rank"]].append((index, idle_ns[index]))
        else:
            estimated = min(max(round((row["seconds"] - transfer) * 1e9), 0), idle_ns[index])
            waits[index] = _Wait(estimated=estimated, num_estimated=1)
    step_ns = measure_step(trace) * 1e9
    for rank, calls in unknown.items():
        # All of them together may be too short to matter, such as those of a group of one rank, which gloo
        # does not name.
        limit = MIN_SHARE * step_ns * trace.activity.steps_by_rank[rank]
        is_negligible = sum(idle for _, idle in calls) < limit
        for index, idle in calls:
            waits[index] = _Wait() if is_negligible else _Wait(possible=idle, num_unknown=1)
    return waits


def _sum_waits(trace: Trace, waits: Mapping[int, _Wait]) -> dict[int, tuple[_Wait, _Wait]]:
    """Return for how long each call's rank had waited in all calls that had ended, at its start and end."""
    of_rank: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for index in waits:
        of_rank[trace.tracks[trace.track_index[index]].rank].append((int(trace.start_ns[index]), index))
    starts: dict[int, _Wait] = {}
    ends: dict[int, _Wait] = {}
    for rank_calls in of_rank.values():
        total = _Wait()
        in_flight: list[tuple[int, int]] = []
        for start, index in [*sorted(rank_calls), (_AFTER_ALL, -1)]:
            while in_flight and in_flight[0][0] <= start:
                _, ended = heapq.heappop(in_flight)
                ends[ended] = total = total.plus(waits[ended])
            if index >= 0:
                heapq.heappush(in_flight, (int(trace.activity.end_ns[index]), index))
                starts[index] = total
    return {index: (starts[index], ends[index]) for index in waits}


def _compute_delays(durations: Ints, own: Ints | None = None) -> Floats:
    """Return by how much each rank arrived after the lower median of the others; rows are calls.

    The median of the others, not the first one, so that one early rank does not make all others stragglers.
    ``own``: the durations that are compared with the medians; default: those of which the medians are.
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
    return np.asarray(np.maximum(median - (durations if own is None else own), 0), np.float64)


def _sum_by_rank(ranks: Ints, values: Floats, num_ranks: int) -> Floats:
    return np.asarray(np.bincount(ranks.ravel(), weights=values.ravel(), minlength=num_ranks), np.float64)


def _sum_by_axis(axes: list[tuple[Ints, Floats]], num_ranks: int) -> Floats:
    """Return the sum of each rank's values (columns) along each axis (rows)."""
    sums = [_sum_by_rank(ranks, values, num_ranks) for ranks, values in axes]
    return np.array(sums, np.float64).reshape(len(axes), num_ranks)


def _compute_p_values(axes: list[tuple[Ints, Floats]], late: Floats) -> Floats:
    """Return the probability that any of equally fast ranks is as late along any axis, for each of ``late``.

    Delays are compared in standard deviations of their axis: along the data-parallel one a few calls have the
    delay of whole steps, and any of its ranks is as late by chance.
    """
    num_axes, num_ranks = late.shape
    means = [(ranks, np.broadcast_to(delays.mean(axis=1)[:, None], delays.shape)) for ranks, delays in axes]
    variances = [
        (ranks, np.broadcast_to(delays.var(axis=1)[:, None], delays.shape)) for ranks, delays in axes
    ]
    expected = _sum_by_axis(means, num_ranks)
    spread = np.sqrt(np.maximum(_sum_by_axis(variances, num_ranks), 1e-30))
    scores = (late - expected) / spread
    if sum(len(delays) for _, delays in axes) > MAX_PERMUTED_CALLS:
        # Normal approximation, times the number of ranks and axes (Bonferroni).
        tails = [[0.5 * math.erfc(score / math.sqrt(2)) for score in row] for row in scores.tolist()]
        return np.asarray(np.minimum(np.array(tails) * num_ranks * num_axes, 1.0), np.float64)
    random = np.random.default_rng(0)  # the same trace gives the same answer
    at_least = np.ones(late.shape)
    for _ in range(NUM_PERMUTATIONS):
        shuffled = [(ranks, random.permuted(delays, axis=1)) for ranks, delays in axes]
        # A sum in another order may differ in the last bits.
        at_least += ((_sum_by_axis(shuffled, num_ranks) - expected) / spread).max() >= scores - 1e-9
    return at_least / (NUM_PERMUTATIONS + 1)


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
    has_messages = "send_recv" in kinds
    latest_first = sorted(rows, key=lambda row: -row["late_seconds"])
    stragglers = [row for row in latest_first if row["is_straggler"]]
    if stragglers:
        parts = [
            f"{_describe_delay(row, step_seconds, has_steps, has_messages)}, by chance: "
            f"{format_chance(row['p_value'])})"
            for row in stragglers[:MAX_NAMED]
        ]
        others = len(stragglers) - MAX_NAMED
        more = f", and {format_count(others, 'more rank')}" if others > 0 else ""
        return f"Stragglers: {', '.join(parts)}{more}."
    latest = latest_first[0]
    if latest["late_seconds"] <= MIN_SHARE * step_seconds:
        whole = "step" if has_steps else "recording"
        return f"Stragglers: none. At {calls} no rank is later than the others by 1 % of the {whole}."
    chance = format_chance(latest["p_value"])
    delay = _describe_delay(latest, step_seconds, has_steps, has_messages).capitalize()
    by_chance = f"at {calls} one of equally fast ranks would be as late by chance in {chance} of recordings."
    # At a few collectives any delay may be chance. At many, more steps would not change the answer.
    if num_calls >= MIN_CALLS_OF_CERTAINTY and (latest["p_value"] or 0.0) >= 0.5:
        return f"Stragglers: none. {delay}), as expected: {by_chance}"
    return f"Stragglers: none that is certain. {delay}), but {by_chance} Record more steps to be sure."


def _describe_uncertain(trace: Trace, latest: StragglerRow, step_seconds: float) -> str:
    delay = _describe_delay(latest, step_seconds, trace.activity.has_steps).capitalize()
    is_missing = trace.world_size > len(trace.ranks)
    fix = "Load the files of all ranks." if is_missing else "Record the same steps on all ranks."
    return (
        f"Stragglers: unknown. {delay}), but it may have waited that long for ranks of which the calls were "
        f"not recorded, and one of them may be slow. {fix}"
    )


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


def _describe_delay(
    row: StragglerRow, step_seconds: float, has_steps: bool, has_messages: bool = False
) -> str:
    """Return a rank's delay, with a bracket that is left open.

    With messages, others wait for the rank there, and need not arrive before it at a collective.
    """
    share = 100 * row["late_seconds"] / step_seconds
    per_step, whole = ("a step", "step") if has_steps else ("in all", "recording")
    verb, than = ("works", "longer than") if has_messages else ("arrives", "after")
    return (
        f"rank {row['rank']} {verb} {format_seconds(row['late_seconds'])} {per_step} {than} the others "
        f"({share:.0f} % of the {whole}"
    )


def format_chance(p_value: float | None) -> str:
    """Return a p-value in percent: ``47 %``, ``0.05 %``."""
    return "unknown" if p_value is None else f"{100 * p_value:.2g} %" if p_value < 0.995 else "100 %"
