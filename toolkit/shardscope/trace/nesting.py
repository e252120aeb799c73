"""Nesting of slices: their rows in a track, their parents, and the union of their times."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]


MAX_ROWS = 500
"""Most rows of a track; Python stacks of real traces need 55."""


def compute_nesting_depth(start_ns: Int64s, end_ns: Int64s) -> npt.NDArray[np.int32]:
    """Return the row of each slice of one track. Slices must be sorted by start, longer first on ties.

    A slice inside another is one row below it. A slice that outlives the one it started in (streams,
    asynchronous work: pytorch#174555) gets the first free row below the innermost one that contains it, so
    that both stay visible. A slice for which no row below :data:`MAX_ROWS` is free gets ``MAX_ROWS``.
    """
    depth = np.zeros(len(start_ns), dtype=np.int32)
    # Slices one after another, as on most GPU streams: one row, without the loop.
    if len(start_ns) < 2 or bool(np.all(start_ns[1:] >= end_ns[:-1])):
        return depth
    nested = _count_enclosing(start_ns, end_ns)
    if nested is not None:
        return nested
    row_ends: list[int] = []  # end of the last slice of each row
    rows = [MAX_ROWS] * len(start_ns)
    full_until = 0  # no row is free before this time
    for index, (start, end) in enumerate(zip(start_ns.tolist(), end_ns.tolist(), strict=True)):
        # Leave the rows of slices that have ended.
        while row_ends and row_ends[-1] <= start:
            row_ends.pop()
        if len(row_ends) == MAX_ROWS:
            # The last row is in use. All rows are in use until the first of their ends.
            if start >= full_until:
                full_until = min(row_ends)
            if start < full_until:
                continue
        elif not row_ends or row_ends[-1] >= end:
            rows[index] = len(row_ends)
            row_ends.append(end)
            continue
        # It outlives its enclosing slice: find the innermost one that contains it, then a free row below.
        row = len(row_ends)
        while row > 0 and row_ends[row - 1] < end:
            row -= 1
        while row < len(row_ends) and row_ends[row] > start:
            row += 1
        if row < MAX_ROWS:
            row_ends[row : row + 1] = [end]  # of a new row, too
            rows[index] = row
    depth[:] = rows
    return depth


def _count_enclosing(start_ns: Int64s, end_ns: Int64s) -> npt.NDArray[np.int32] | None:
    """Return the number of slices around each one; None if calls are not nested or rows would run out.

    Calls of one thread are nested, and counting needs no loop. Slices are sorted as in
    :func:`compute_nesting_depth`.
    """
    # A slice is inside the earlier ones that have not ended at its start. Slices of no length at its start
    # that come after it have ended, too, but are not earlier: add them back. int32, because several of these
    # arrays are in memory together.
    depth = np.arange(len(start_ns), dtype=np.int32)
    depth -= np.searchsorted(np.sort(end_ns), start_ns, side="right").astype(np.int32)
    is_point = start_ns == end_ns
    if is_point.any():
        num_points = np.concatenate(([0], np.cumsum(is_point, dtype=np.int32)))
        last = np.searchsorted(start_ns, start_ns, side="right")
        depth += (num_points[last] - num_points[:-1]).astype(np.int32)
    if int(depth.max()) >= MAX_ROWS:
        return None
    # The last earlier slice in the row above must contain it.
    order = np.argsort(depth.astype(np.int16), kind="stable")
    by_depth = depth[order]
    bounds = np.searchsorted(by_depth, np.arange(int(by_depth[-1]) + 2))
    for row in range(1, len(bounds) - 1):
        above, inner = order[bounds[row - 1] : bounds[row]], order[bounds[row] : bounds[row + 1]]
        parents = above[np.searchsorted(above, inner) - 1]
        if np.any(end_ns[parents] < end_ns[inner]):
            return None
    return depth


def compute_union_ns(start_ns: Int64s, end_ns: Int64s) -> int:
    """Return the nanoseconds covered by at least one of the intervals."""
    if len(start_ns) == 0:
        return 0
    # Each interval adds what lies beyond the furthest end so far.
    order = np.argsort(start_ns, kind="stable")
    start, end = start_ns[order], end_ns[order]
    reach = np.maximum.accumulate(end)
    before = np.concatenate((start[:1], reach[:-1]))
    return int(np.maximum(reach - np.maximum(start, before), 0).sum())


def find_parents(
    start_ns: Int64s, end_ns: Int64s, row_bounds: Int64s, is_first_row: npt.NDArray[np.bool_]
) -> Int64s:
    """Return the parent of each slice, the slice around it one row above in its track; -1 if there is none.

    Slices are sorted by row and start. Row r has the slices ``row_bounds[r]`` to ``row_bounds[r + 1]``, and
    ``is_first_row[r]`` marks the first row of a track. A slice that outlives the one above it has no parent.
    """
    parents = np.full(len(start_ns), -1, dtype=np.int64)
    # Slices of a row do not overlap, so the candidate is the last one above that starts no later.
    for row in np.flatnonzero(~is_first_row).tolist():
        above, first, end = row_bounds[row - 1 : row + 2].tolist()
        parent = above + np.searchsorted(start_ns[above:first], start_ns[first:end], side="right") - 1
        encloses = (parent >= above) & (end_ns[np.maximum(parent, above)] >= end_ns[first:end])
        parents[first:end] = np.where(encloses, parent, -1)
    return parents


def mark_recursive_calls(parents: Int64s, names: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """Return a mask of slices with an ancestor of the same name, which includes their time already."""
    is_recursive = np.zeros(len(parents), dtype=bool)
    slices = np.flatnonzero(parents >= 0)
    ancestors = parents[slices]
    # One level of ancestors per round, for all slices at once. Slices that are known to be recursive drop
    # out.
    while len(slices):
        is_recursive[slices] |= names[ancestors] == names[slices]
        continues = (parents[ancestors] >= 0) & ~is_recursive[slices]
        slices, ancestors = slices[continues], parents[ancestors[continues]]
    return is_recursive
