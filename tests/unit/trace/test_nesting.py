"""Tests of the rows of slices, for calls that nest and for slices that outlive each other."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardscope.trace.nesting import compute_nesting_depth


@st.composite
def calls(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Return calls of one thread: each ends before the one around it, and may take no time."""
    times: list[tuple[int, int]] = []

    def add(begin: int, end: int, depth: int) -> None:
        while begin <= end and len(times) < 40:
            start = draw(st.integers(begin, end))
            stop = draw(st.integers(start, end))
            times.append((start, stop))
            if depth < 4 and draw(st.booleans()):
                add(start, stop, depth + 1)
            begin = stop + draw(st.integers(0, 2))

    add(0, 30, 0)
    return times


def place_one_by_one(times: list[tuple[int, int]]) -> list[int]:
    """Return the rows of nested calls, computed with a plain stack."""
    rows, ends = [], []
    for start, end in times:
        while ends and ends[-1] <= start:
            ends.pop()
        rows.append(len(ends))
        ends.append(end)
    return rows


@given(calls())
def test_nested_calls_get_the_rows_of_a_stack(times: list[tuple[int, int]]) -> None:
    times.sort(key=lambda each: (each[0], -each[1]))
    start, end = np.array(times, np.int64).T
    assert compute_nesting_depth(start, end).tolist() == place_one_by_one(times)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 8)), min_size=1, max_size=20))
def test_slices_of_one_row_never_overlap(spans: list[tuple[int, int]]) -> None:
    times = sorted(((start, start + length) for start, length in spans), key=lambda t: (t[0], -t[1]))
    start, end = np.array(times, np.int64).T
    depth = compute_nesting_depth(start, end)
    for row in range(int(depth.max()) + 1):
        mine = depth == row
        assert (start[mine][1:] >= end[mine][:-1]).all()
