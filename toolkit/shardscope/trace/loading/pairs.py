"""Slices from begin and end events (B and E, b and e), and small helpers for dicts of columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from shardscope.trace.loading import chunks
from shardscope.trace.loading.chunks import Key, as_integers

Columns = dict[str, npt.NDArray[np.int64]]
"""Columns of integers by name, all of one length. Their type is int64, but they may have fewer bytes."""

ASYNC_PREFIX = "async "
"""Begin of the thread of a track of asynchronous work, which belongs to no thread."""
_PAIRED = (chunks.BEGIN, chunks.END, chunks.ASYNC_BEGIN, chunks.ASYNC_END)


def concatenate(pieces: list[Columns]) -> Columns:
    """Return the rows of all pieces, one after the other. The pieces are emptied, to save memory."""
    return {name: np.concatenate([piece.pop(name) for piece in pieces]) for name in tuple(pieces[0])}


def select(columns: Columns, index: npt.NDArray[np.int64], names: Iterable[str]) -> Columns:
    """Return the rows ``index`` of the columns ``names``."""
    return {name: columns[name][index] for name in names}


def reorder(columns: Columns, index: npt.NDArray[np.int64]) -> None:
    """Replace the columns by their rows ``index``, one after the other, to save memory."""
    for name in columns:
        columns[name] = columns[name][index]


def narrow(columns: Columns) -> None:
    """Store the columns in place with as few bytes as their values need; times keep 64 bits."""
    for name, column in columns.items():
        if name in ("start_ns", "duration_ns"):
            continue
        low, high = (int(column.min()), int(column.max())) if len(column) else (0, 0)
        # No unsigned types, whose differences wrap around, and no int8, which is hardly smaller.
        for kind in (np.int16, np.int32) if name in ("depth", "phase") else (np.int32,):
            if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max:
                columns[name] = as_integers(column.astype(kind))
                break


def pair_ends(
    events: Columns,
    is_present: npt.NDArray[np.bool_],
    slices: Columns,
    keys: list[Key],
    categories: list[str],
    oddities: Counter[str],
) -> Columns:
    """Return ``slices`` and those of begin and end events.

    Asynchronous pairs (b and e) match by id and category, and get tracks of their own in ``keys``.
    """
    rows = np.flatnonzero(is_present & np.isin(events["phase"], _PAIRED))
    if not len(rows):
        return slices
    rows = rows[np.argsort(events["start_ns"][rows], kind="stable")]
    fields = (events[name][rows].tolist() for name in ("phase", "start_ns", "key", "category", "id"))
    key_index = {key: position for position, key in enumerate(keys)}
    open_begins: dict[tuple[object, ...], list[int]] = {}
    begins: list[int] = []
    ends: list[int] = []
    of_key: list[int] = []
    num_unmatched = 0
    for row, phase, start, key, category, number in zip(rows.tolist(), *fields, strict=True):
        is_async = phase in (chunks.ASYNC_BEGIN, chunks.ASYNC_END)
        group: tuple[object, ...] = (keys[key][0], category, number) if is_async else (key,)
        stack = open_begins.setdefault(group, [])
        if phase in (chunks.BEGIN, chunks.ASYNC_BEGIN):
            stack.append(len(begins))
            begins.append(row)
            ends.append(chunks.ABSENT)
            if is_async:
                async_key = (keys[key][0], f"{ASYNC_PREFIX}{categories[category]}".strip())
                key = key_index.setdefault(async_key, len(key_index))
            of_key.append(key)
        elif stack:
            ends[stack.pop()] = start
        else:
            num_unmatched += 1
    keys += list(key_index)[len(keys) :]
    last_ns = max(int(events["start_ns"][is_present].max()), _find_end(slices))
    num_open = ends.count(chunks.ABSENT)
    if num_open:
        oddities["begin events without an end drawn to the last event"] += num_open
    if num_unmatched:
        oddities["end events without a begin left out"] += num_unmatched
    paired = select(events, np.array(begins, np.int64), tuple(slices))
    end_ns = np.array(ends, np.int64)
    paired["duration_ns"] = np.where(end_ns == chunks.ABSENT, last_ns, end_ns) - paired["start_ns"]
    paired["key"] = np.array(of_key, np.int64)
    # Work keeps its correlation id; that of asynchronous pairs has served its purpose.
    is_thread = events["phase"][np.array(begins, np.int64)] == chunks.BEGIN
    paired["id"] = np.where(is_thread, paired["id"], -1)
    return concatenate([slices, paired])


def _find_end(slices: Columns) -> int:
    return int((slices["start_ns"] + slices["duration_ns"]).max(initial=chunks.ABSENT))
