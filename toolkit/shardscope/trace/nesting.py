"""On which row of its track a slice is drawn: calls beneath their caller, and nothing hidden."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]


def nesting_depth(start_ns: Int64s, end_ns: Int64s) -> npt.NDArray[np.int32]:
    """Row of each slice of one track; slices must come sorted by start, the longer first on a tie.

    A slice inside another is one row beneath it. A slice that outlives the one it started in (streams,
    asynchronous work: pytorch#174555) takes the first row that is free there, so that both stay visible.
    """
    depth = np.zeros(len(start_ns), dtype=np.int32)
    if len(start_ns) < 2 or bool(np.all(start_ns[1:] >= end_ns[:-1])):
        return depth
    row_ends: list[int] = []  # when the last slice of each row ends
    rows = [0] * len(start_ns)
    for index, (start, end) in enumerate(zip(start_ns.tolist(), end_ns.tolist(), strict=True)):
        while row_ends and row_ends[-1] <= start:
            row_ends.pop()
        if not row_ends or row_ends[-1] >= end:
            rows[index] = len(row_ends)
            row_ends.append(end)
            continue
        row = len(row_ends)
        while row > 0 and row_ends[row - 1] < end:
            row -= 1
        while row < len(row_ends) and row_ends[row] > start:
            row += 1
        if row == len(row_ends):
            row_ends.append(end)
        else:
            row_ends[row] = end
        rows[index] = row
    depth[:] = rows
    return depth


def union_ns(start_ns: Int64s, end_ns: Int64s) -> int:
    """Nanoseconds covered by at least one of the intervals."""
    if len(start_ns) == 0:
        return 0
    order = np.argsort(start_ns, kind="stable")
    start, end = start_ns[order], end_ns[order]
    reach = np.maximum.accumulate(end)
    before = np.concatenate((start[:1], reach[:-1]))
    return int(np.maximum(reach - np.maximum(start, before), 0).sum())
