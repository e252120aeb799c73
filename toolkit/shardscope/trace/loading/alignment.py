"""One time axis for all ranks: by the wall clock, by collectives, which ranks leave together, or by hand."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from shardscope.trace.arguments import CollectiveArgs
from shardscope.trace.categories import (
    COMMUNICATION_KERNELS,
    GPU_CATEGORIES,
    HOST_COLLECTIVES,
    RUNTIME_CATEGORIES,
    STEP,
    WRAPPER_CATEGORIES,
)
from shardscope.trace.files import refuse_file
from shardscope.trace.loading.rank_columns import RankColumns, get_rank
from shardscope.trace.loading.splitting import UNREADABLE

Align = Literal["clock", "collectives"] | Mapping[int, float]
"""How ranks are aligned: by the wall clock, by collectives, or by seconds to add to the times of each."""

Int64s = npt.NDArray[np.int64]

_EPOCH_NS = 10**18  # the year 2001: times above it are wall clock, times below count from boot or zero
_MAX_GAP_NS = 3600 * 10**9
"""Largest gap between recordings whose clocks differ; beyond, they are taken for different runs."""
_MIN_DIFFERENCE_NS, _MIN_CALLS = 5_000_000, 5
"""Minimum difference of clocks for a note, and minimum calls to prove it. Clocks with NTP differ by less."""
_MAX_SPREAD_NS, _MAX_SPREAD_SHARE = 1_000_000, 0.02
"""Maximum scatter of the ends of matched calls: nanoseconds, or a share of the time that they span."""
_MAX_LISTED = 8
_POINT_TO_POINT = re.compile("send|recv", re.IGNORECASE)
"""Names of communication that does not end on all ranks together."""


def check_align(align: object) -> None:
    """Raise ``ValueError`` unless ``align`` is one of the choices of :data:`Align`."""
    if isinstance(align, str) and align in ("clock", "collectives"):
        return
    if not isinstance(align, Mapping):
        raise ValueError(
            f"Trace.load got align={align!r}; allowed: 'clock', 'collectives', or seconds by rank. "
            "Fix: align={1: -2.5} moves rank 1 to 2.5 s earlier."
        )
    for rank, seconds in align.items():
        is_number = isinstance(seconds, int | float | np.number) and not isinstance(seconds, bool)
        if not is_number or not math.isfinite(seconds) or abs(seconds) > 1e9:
            raise ValueError(
                f"Trace.load got {seconds!r} seconds for rank {rank!r}; allowed: finite numbers up to 1e9. "
                "Fix: align={1: -2.5} moves rank 1 to 2.5 s earlier."
            )


def align_ranks(ranks: list[RankColumns], align: Align, notes: list[str]) -> list[int]:
    """Return the nanoseconds to subtract from each rank's times, so that all are on one axis.

    ``"clock"`` is the wall clock if all ranks have one and their recordings overlap, and collectives if not;
    ranks without collectives in common each start at 0. Raises ``ValueError`` for recordings more than an
    hour apart, and for seconds of a rank that was not recorded.
    """
    shifts = _assume_base(ranks, notes)
    spans = [
        _find_span(rank, shift)
        for rank, shift in zip(ranks, shifts, strict=True)
        if len(rank.slices["start_ns"])
    ]
    # Ranks of one merged file are on one axis, whatever its origin.
    on_one_axis = len(ranks) > 1 and len({rank.path for rank in ranks}) == 1
    if on_one_axis and align == "clock":
        return shifts
    on_wall_clock = on_one_axis or all(first > _EPOCH_NS for first, _ in spans)
    if isinstance(align, Mapping):
        return _move_by_hand(ranks, shifts if on_wall_clock else _list_starts(ranks), align, notes)
    if len(spans) < 2:
        return shifts
    # Files of one run overlap in time. Without an overlap they are of different runs, or of hosts whose
    # clocks differ, and a common axis would be mostly empty.
    gap_ns = max(first for first, _ in spans) - min(last for _, last in spans)
    if on_wall_clock and gap_ns <= 0:
        if align == "collectives":
            return _move_by_collectives(ranks, shifts, notes) or shifts
        _note_differing_clocks(ranks, shifts, notes)
        return shifts
    if on_wall_clock and gap_ns > _MAX_GAP_NS and align == "clock":
        _refuse_different_runs(ranks, gap_ns)
    problem = (
        "ranks were recorded at times that do not overlap" if on_wall_clock else "no wall clock in the files"
    )
    starts = _list_starts(ranks)
    moved = _move_by_collectives(ranks, shifts if on_wall_clock else starts, notes, problem)
    if moved is None:
        notes.append(f"{problem}: each rank starts at 0, so skew between them is hidden")
    return moved or starts


def _find_span(rank: RankColumns, shift: int) -> tuple[int, int]:
    """Return the starts of a rank's first and last slice."""
    start_ns = rank.slices["start_ns"]
    span = int(start_ns.min()) - shift, int(start_ns.max()) - shift
    rank.release()
    return span


def _list_starts(ranks: list[RankColumns]) -> list[int]:
    return [int(rank.slices["start_ns"].min(initial=2**62)) for rank in ranks]


def _move_by_hand(
    ranks: list[RankColumns], shifts: list[int], align: Mapping[int, float], notes: list[str]
) -> list[int]:
    numbers = [get_rank(rank) for rank in ranks]
    unknown = [rank for rank in align if rank not in numbers]
    if unknown:
        raise ValueError(
            f"Trace.load got seconds for rank {unknown[0]!r}, which was not recorded; allowed: {numbers}. "
            "Fix: leave it out of align."
        )
    if align:
        notes.append(f"moved by hand: {_list_moves(dict(align))}")
    return [shift - round(align.get(rank, 0.0) * 1e9) for rank, shift in zip(numbers, shifts, strict=True)]


def _list_moves(seconds: dict[int, float]) -> str:
    moves = [f"rank {rank} by {move:+.6g} s" for rank, move in seconds.items()]
    return ", ".join(moves[:_MAX_LISTED]) + (" ..." if len(moves) > _MAX_LISTED else "")


def _refuse_different_runs(ranks: list[RankColumns], gap_ns: int) -> None:
    begins = {rank.path: int(rank.slices["start_ns"].min()) for rank in ranks if len(rank.slices["start_ns"])}
    first, last = min(begins, key=begins.__getitem__), max(begins, key=begins.__getitem__)
    refuse_file(
        last,
        f"was recorded {gap_ns / 3600e9:,.1f} hours after {first.name}: they seem to be of different runs",
        "keep the files of one run in the folder, or align hosts whose clocks differ by their collectives, "
        "Trace.load(..., align='collectives')",
    )


def _assume_base(ranks: list[RankColumns], notes: list[str]) -> list[int]:
    """Return a shift for each rank: 0, or the other ranks' base time where a truncated file has none.

    Kineto writes the base time behind the events, and the same one in all ranks of a host.
    """
    shifts = [0] * len(ranks)
    bases = Counter(rank.texts.document.base_ns for rank in ranks if rank.texts.document.base_ns)
    if len(bases) != 1:
        return shifts
    (base_ns,) = bases
    for position, rank in enumerate(ranks):
        start_ns = rank.slices["start_ns"]
        if not rank.texts.document.base_ns and len(start_ns) and int(start_ns.max()) < _EPOCH_NS:
            shifts[position] = -base_ns
            notes.append(
                f"rank {get_rank(rank)}: no base time in {rank.path.name}, that of the other ranks is assumed"
            )
    return shifts


@dataclass(kw_only=True)
class _Calls:
    """Collective calls of one rank in order of start, by a key that is the same on all ranks."""

    ends: dict[tuple[object, ...], Int64s]
    steps: dict[tuple[object, ...], Int64s] = field(default_factory=dict)
    """Step of each call, -1 outside of steps; empty if no step was recorded."""


@dataclass(frozen=True, kw_only=True)
class _Offset:
    """Offset of one rank's clock from another's, in nanoseconds, by the ends of their common calls."""

    median_ns: int
    spread_ns: int
    """Median absolute deviation of the calls from the median."""
    num_calls: int
    is_consistent: bool


def _move_by_collectives(
    ranks: list[RankColumns], shifts: list[int], notes: list[str], problem: str = ""
) -> list[int] | None:
    """Return shifts with which ranks leave their collectives together; None if no two have any in common.

    The n-th call of a name in a group and step on one rank is the n-th on every other. All ranks leave it
    together, so the median difference of the ends is that of the clocks.
    """
    calls = [_list_calls(rank, shift, with_groups=True) for rank, shift in zip(ranks, shifts, strict=True)]
    # The first rank that has any: of a recording cut off early, rank 0 may have none.
    first = next((position for position, one in enumerate(calls) if one.ends), 0)
    # Ranks without a group in common are aligned through others: from each aligned rank to its peers.
    late_ns: dict[int, int] = {first: 0}
    offsets: list[_Offset] = []
    queue = [first]
    while queue:
        reference = queue.pop(0)
        for position in range(len(ranks)):
            if position in late_ns:
                continue
            offset = _compare_ends(calls[reference], calls[position])
            if offset is not None and offset.is_consistent:
                late_ns[position] = late_ns[reference] + offset.median_ns
                offsets.append(offset)
                queue.append(position)
    if not offsets:
        if not problem:
            notes.append("ranks have no collectives in common by which they could be aligned")
        return None
    num_calls = min(offset.num_calls for offset in offsets)
    spread_us = max(offset.spread_ns for offset in offsets) / 1e3
    moves = {get_rank(ranks[one]): -late / 1e9 for one, late in late_ns.items() if one != first}
    notes.append(
        f"{problem + ': ' if problem else ''}aligned by {num_calls:,} or more collectives of each rank, "
        f"which then end within {spread_us:,.0f} \u00b5s; moved: {_list_moves(dict(sorted(moves.items())))}"
    )
    moved = [shift + late_ns.get(position, 0) for position, shift in enumerate(shifts)]
    others = [position for position in range(len(ranks)) if position not in late_ns]
    if others:
        numbers = [str(get_rank(ranks[position])) for position in others]
        listed = ", ".join(numbers[:_MAX_LISTED]) + (" ..." if len(numbers) > _MAX_LISTED else "")
        where = "begins with it" if problem else "keeps its clock"
        notes.append(f"rank {listed}: no collectives in common with rank {get_rank(ranks[first])}, {where}")
    starts = _list_starts(ranks)
    for position in others if problem else ():
        moved[position] = starts[position] - (starts[first] - moved[first])
    return moved


def _note_differing_clocks(ranks: list[RankColumns], shifts: list[int], notes: list[str]) -> None:
    """Add a note if the ends of collectives, matched by name only, show that clocks differ."""
    reference: RankColumns | None = None
    late: dict[int, float] = {}
    for rank, shift in zip(ranks, shifts, strict=True):
        calls = _list_calls(rank, shift, with_groups=False)
        if reference is None:
            if calls.ends:
                reference, first = rank, calls
            continue
        offset = _compare_ends(first, calls)
        if offset is None or not offset.is_consistent or offset.num_calls < _MIN_CALLS:
            continue
        if abs(offset.median_ns) > max(_MIN_DIFFERENCE_NS, 10 * offset.spread_ns):
            late[get_rank(rank)] = offset.median_ns / 1e9
    if late and reference is not None:
        notes.append(
            "ranks end the same collectives at different times, so clocks differ from that of rank "
            f"{get_rank(reference)}: {_list_moves(late)}. Fix: Trace.load(..., align='collectives')"
        )


def _compare_ends(one: _Calls, other: _Calls) -> _Offset | None:
    """Return by how much later the calls of ``other`` end; None without calls in common."""
    pairs = []
    for key in one.ends.keys() & other.ends.keys():
        ours, theirs = one.ends[key], other.ends[key]
        if one.steps and other.steps:
            ours, theirs = _select_common_steps(ours, one.steps[key], theirs, other.steps[key])
        # If the numbers of calls differ, one recording began earlier or ended in the middle.
        if len(ours) == len(theirs):
            pairs.append((ours, theirs))
    ends = np.concatenate([ours for ours, _ in pairs]) if pairs else np.zeros(0, np.int64)
    if not len(ends):
        return None
    late_ns = np.concatenate([theirs for _, theirs in pairs]) - ends
    median_ns = int(np.median(late_ns))
    spread_ns = int(np.median(np.abs(late_ns - median_ns)))
    limit = max(_MAX_SPREAD_NS, _MAX_SPREAD_SHARE * float(np.ptp(ends)))
    return _Offset(
        median_ns=median_ns, spread_ns=spread_ns, num_calls=len(ends), is_consistent=spread_ns <= limit
    )


def _select_common_steps(
    ours: Int64s, our_steps: Int64s, theirs: Int64s, their_steps: Int64s
) -> tuple[Int64s, Int64s]:
    """Return the calls of the steps in which both ranks have equally many, sorted by step."""
    here, our_counts = np.unique(our_steps, return_counts=True)
    there, their_counts = np.unique(their_steps, return_counts=True)
    steps, a, b = np.intersect1d(here, there, return_indices=True)
    steps = steps[(our_counts[a] == their_counts[b]) & (steps >= 0)]
    selected = []
    for ends, of in ((ours, our_steps), (theirs, their_steps)):
        order = np.argsort(of, kind="stable")
        selected.append(ends[order][np.isin(of[order], steps)])
    return selected[0], selected[1]


def _list_calls(rank: RankColumns, shift: int, *, with_groups: bool) -> _Calls:
    """Return the ends of a rank's collectives by name; ``with_groups`` also by group, with their steps."""
    names, slices = rank.texts.names, rank.slices
    index = _find_collectives(rank)
    index = index[np.argsort(slices["start_ns"][index], kind="stable")]
    ends = (slices["start_ns"][index] + slices["duration_ns"][index] - shift).tolist()
    keys: list[tuple[object, ...]] = [(names[name],) for name in slices["name"][index].tolist()]
    if not with_groups:
        rank.release()
        return _Calls(ends=_group_by_key(keys, ends))
    decoder = msgspec.json.Decoder(CollectiveArgs, strict=False)
    for position, text in rank.arguments.iterate(slices["row"][index].astype(np.int64)):
        try:
            args = decoder.decode(text)
        except UNREADABLE:
            continue
        keys[position] += (args.group, args.group_ranks, args.in_elements)
    steps = _find_steps(rank, index)
    rank.release()
    has_steps = max(steps, default=-1) >= 0
    return _Calls(ends=_group_by_key(keys, ends), steps=_group_by_key(keys, steps) if has_steps else {})


def _group_by_key(keys: list[tuple[object, ...]], values: list[int]) -> dict[tuple[object, ...], Int64s]:
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for key, value in zip(keys, values, strict=True):
        groups[key].append(value)
    return {key: np.array(numbers, np.int64) for key, numbers in groups.items()}


def _find_collectives(rank: RankColumns) -> Int64s:
    """Return the collective kernels of a rank, or the annotations of gloo if it has none."""
    texts, slices = rank.texts, rank.slices
    if not len(slices["name"]):
        return np.zeros(0, np.int64)

    def find(names: list[bool], categories: frozenset[str]) -> Int64s:
        of_category = np.array([category in categories for category in texts.categories], dtype=bool)
        mask = np.array(names, dtype=bool)[slices["name"]] & of_category[slices["category"]]
        return np.flatnonzero(mask)

    together = [_POINT_TO_POINT.search(name) is None for name in texts.names]
    kernels = [COMMUNICATION_KERNELS.search(name) is not None for name in texts.names]
    work = GPU_CATEGORIES - WRAPPER_CATEGORIES
    index = find([a and b for a, b in zip(together, kernels, strict=True)], work)
    if len(index):
        return index
    annotations = [HOST_COLLECTIVES.match(name) is not None for name in texts.names]
    return find([a and b for a, b in zip(together, annotations, strict=True)], WRAPPER_CATEGORIES)


def _find_steps(rank: RankColumns, index: Int64s) -> list[int]:
    """Return the number of the step in which each slice was launched; -1 outside of all steps."""
    texts, slices = rank.texts, rank.slices
    matches = [STEP.match(name) for name in texts.names]
    numbers = np.array([int(match[1][:9]) if match else -1 for match in matches], np.int64)
    marks = np.flatnonzero(numbers[slices["name"]] >= 0) if len(index) else index
    on_gpu = np.array([category in GPU_CATEGORIES for category in texts.categories], dtype=bool)
    if len(marks) and not on_gpu[slices["category"][marks]].all():
        marks = marks[~on_gpu[slices["category"][marks]]]
    if not len(marks):
        return [-1] * len(index)
    marks = marks[np.argsort(slices["start_ns"][marks], kind="stable")]
    # Kernels belong to the step of their launch, which has the same correlation id.
    times = slices["start_ns"][index]
    is_runtime = np.array([category in RUNTIME_CATEGORIES for category in texts.categories], dtype=bool)
    launches = np.flatnonzero(is_runtime[slices["category"]] & (slices["id"] >= 0))
    if len(launches):
        launches = launches[np.argsort(slices["id"][launches], kind="stable")]
        ids = slices["id"][launches]
        launch_position = np.minimum(np.searchsorted(ids, slices["id"][index]), len(ids) - 1)
        times = np.where(
            ids[launch_position] == slices["id"][index], slices["start_ns"][launches[launch_position]], times
        )
    starts = slices["start_ns"][marks]
    position = np.searchsorted(starts, times, side="right") - 1
    inside = (position >= 0) & (times <= (starts + slices["duration_ns"][marks])[position])
    steps: list[int] = np.where(inside, numbers[slices["name"][marks]][position], -1).tolist()
    return steps
