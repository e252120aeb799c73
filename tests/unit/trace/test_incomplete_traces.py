"""Tests of recordings that lack ranks or steps: the rest is analysed, and notes name what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.trace.trace_events import Events, all_reduce, kernel, load_ranks, operator, step

from shardscope.trace import Trace


def make_steps(*numbers: int) -> Events:
    """Return steps of 1 us: 600 ns of compute, then 300 ns of communication."""
    events: Events = []
    for number in numbers:
        begin = 1000 * number
        events += [
            step(number, begin, begin + 1000),
            kernel(begin, begin + 600),
            all_reduce(begin + 600, begin + 900),
        ]
    return events


def find_note(trace: Trace, part: str) -> str:
    (note,) = (note for note in trace.notes if part in note)
    return note


def test_fault_38_one_rank_of_many_is_analysed_alone(tmp_path: Path) -> None:
    trace = load_ranks(tmp_path, {37: make_steps(1, 2)}, info={"world_size": 200})
    assert (trace.ranks, trace.world_size, trace.notes) == ([37], 200, ["one rank of 200"])
    assert str(trace.summary()).startswith("1 rank of 200, 2 steps")
    # Alone, a call has no transfer time apart from its waiting.
    assert all(row["transfer_seconds"] is None for row in trace.collectives())
    assert trace.stragglers()[0]["is_straggler"] is False


def test_fault_38_a_profiler_that_stopped_in_the_middle_is_named(tmp_path: Path) -> None:
    ranks = {0: make_steps(1, 2, 3, 4), 1: [*make_steps(1, 2), step(3, 3000, 3200), kernel(3000, 3200)]}
    trace = load_ranks(tmp_path, ranks)
    assert find_note(trace, "step") == "rank 1: step 4 not recorded, though other ranks did"
    assert {(row["rank"], row["step"]) for row in trace.steps()} >= {(0, 4), (1, 3)}
    assert trace.summary().sentences


def test_fault_38_ranks_without_steps_are_named(tmp_path: Path) -> None:
    ranks = {0: make_steps(1, 2), 1: [operator(0, 100)], 2: [operator(0, 100)]}
    trace = load_ranks(tmp_path, ranks)
    assert find_note(trace, "step") == "rank 1, 2: steps 1, 2 not recorded, though other ranks did"
    assert trace.summary().sentences


@pytest.mark.parametrize(
    ("numbers", "part"), [((1, 2, 5), "steps 3, 4 between others"), ((0, 10**8), ""), ((3, 4, 5), "")]
)
def test_fault_38_missing_steps_are_listed(tmp_path: Path, numbers: tuple[int, ...], part: str) -> None:
    trace = load_ranks(tmp_path, {0: make_steps(*numbers)})
    assert [note.partition(" not")[0] for note in trace.notes] == ([part] if part else [])
    assert len(trace.steps()) == len(numbers)
