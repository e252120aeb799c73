"""Tests of a run's speed, its remaining time and its slowest rank."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from tests.requirements import thorough

from shardscope.runs.watch import pace as pace_module
from shardscope.runs.watch.pace import Pace


def make_records(rank: int, steps: range, seconds: float, every: float | None = None) -> list[dict[str, Any]]:
    between = seconds if every is None else every
    return [
        {"step": step, "rank": rank, "time": 1000.0 + between * step, "step_seconds": seconds}
        for step in steps
    ]


def test_the_slowest_of_many_ranks_is_found() -> None:
    pace = Pace()
    for rank in range(12):
        pace.add(make_records(rank, range(30), 1.5 if rank == 10 else 1.0, every=1.5))
    slowest = pace.slowest
    assert slowest is not None
    assert (slowest.rank, slowest.num_ranks, slowest.steps_behind) == (10, 12, 0)
    assert slowest.excess == pytest.approx(0.5) and not slowest.is_even


def test_equally_fast_ranks_are_even() -> None:
    pace = Pace()
    for rank in range(2):
        pace.add(make_records(rank, range(30), 1.0 + 0.001 * rank))
    assert pace.slowest is not None and pace.slowest.is_even


def test_only_recent_steps_count() -> None:
    pace = Pace()
    pace.add(make_records(0, range(100), 1.0))
    pace.add(make_records(1, range(50), 9.0, every=1.0))
    pace.add(make_records(1, range(50, 100), 1.0))
    assert pace.slowest is not None and pace.slowest.is_even


def test_a_rank_that_stopped_logging_is_behind() -> None:
    pace = Pace()
    pace.add(make_records(0, range(40), 1.0))
    pace.add(make_records(1, range(20), 1.0))
    assert pace.slowest is not None
    assert (pace.slowest.rank, pace.slowest.steps_behind) == (1, 20)
    assert not pace.slowest.is_even


def test_remaining_time_includes_time_between_steps() -> None:
    pace = Pace()
    # A step takes a second, and a checkpoint between steps another one.
    pace.add(make_records(0, range(10), 1.0, every=2.0))
    assert pace.seconds_per_step == pytest.approx(2.0)
    now = 1000.0 + 2.0 * 9
    assert pace.seconds_left(100, now) == pytest.approx(180.0)
    assert pace.seconds_left(100, now + 0.5) == pytest.approx(179.5)
    assert pace.seconds_left(100, now + 600) == pytest.approx(178.0), "a hang is not progress"
    assert pace.seconds_left(10, now) == 0.0


def test_remaining_time_includes_validation_but_no_restart() -> None:
    pace, records = Pace(), make_records(0, range(12), 1.0)
    # Validation takes four seconds after every fourth step, and a restart an hour after the eighth.
    for record in records:
        record["time"] += 4.0 * (record["step"] // 4) + 3600.0 * (record["step"] > 8)
    pace.add(records)
    assert pace.seconds_per_step == pytest.approx((11 + 2 * 4 + 9) / 11)


def test_the_rate_is_the_median_of_rank_0() -> None:
    pace = Pace()
    assert pace.tokens_per_second is None
    pace.add({"step": step, "rank": 0, "time": float(step), "tokens_per_second": 100.0} for step in range(9))
    pace.add([{"step": 9, "rank": 0, "time": 9.0, "tokens_per_second": 900.0}])
    pace.add([{"step": 9, "rank": 1, "time": 9.0, "tokens_per_second_all_ranks": 5.0}])
    assert pace.tokens_per_second == ("tokens_per_second", 100.0)


def test_logging_every_tenth_step_gives_seconds_per_step() -> None:
    pace = Pace()
    pace.add({"step": step, "rank": 0, "time": float(step)} for step in range(0, 200, 10))
    assert pace.seconds_per_step == pytest.approx(1.0) and pace.last_step == 190


@pytest.mark.parametrize("odd", [None, "x", float("nan"), float("inf"), -1.0, True, [1]])
def test_malformed_records_are_skipped(odd: Any) -> None:
    pace = Pace()
    pace.add([
        {"step": odd, "rank": 0, "time": 1.0, "step_seconds": 1.0},
        {"step": 0, "rank": odd, "time": 1.0, "step_seconds": 1.0},
        {"step": 0, "rank": 1, "time": odd if odd != -1.0 else None, "step_seconds": 1.0},
    ])  # fmt: skip
    assert pace.last_step is None and pace.seconds_per_step is None and pace.slowest is None
    pace.add([{"step": 0, "rank": rank, "time": 1.0, "step_seconds": odd} for rank in (0, 1)])
    assert pace.slowest is None and pace.seconds_left(10, 2.0) is None


@thorough()
def test_pace_keeps_only_the_latest_steps() -> None:
    pace = Pace()
    tracemalloc.start()
    pace.add(make_records(0, range(100_000), 1.0))
    # Other threads of this process allocate meanwhile: only what pace.py allocated counts.
    snapshot = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, pace_module.__file__)])
    tracemalloc.stop()
    assert 0 < sum(trace.size for trace in snapshot.traces) < 50_000


def test_ranks_with_equal_steps_of_two_lengths_are_even() -> None:
    """The medians of two ranks whose steps take 1.2 or 1.4 s may be one of each."""
    pace = Pace()
    for step in range(20):
        for rank in (0, 1):
            seconds = (1.2 if step % 2 else 1.4) + 0.001 * (rank == step % 3)
            pace.add([{"step": step, "rank": rank, "time": float(step), "step_seconds": seconds}])
    # Rank 1 lacks a short step.
    pace.add([{"step": 20, "rank": 0, "time": 20.0, "step_seconds": 1.2}])
    assert pace.slowest is not None and pace.slowest.is_even


def test_the_slowest_of_many_ranks_is_compared_with_the_median_of_the_others() -> None:
    pace = Pace()
    for step in range(5):
        for rank in range(9):
            seconds = 1.5 if rank == 7 else 1.0 + 0.01 * rank
            pace.add([{"step": step, "rank": rank, "time": float(step), "step_seconds": seconds}])
    slowest = pace.slowest
    assert slowest is not None and (slowest.rank, slowest.num_ranks) == (7, 9)
    assert slowest.excess == pytest.approx(1.5 / 1.035 - 1)


@pytest.mark.parametrize(
    ("every", "seconds", "lacks", "is_behind"),
    [
        (1, 1.0, 3, False),
        (1, 1.0, 4, True),
        # Logged every tenth step: lateness counts in these intervals.
        (10, 1.0, 20, False),
        (10, 1.0, 40, True),
        # Of steps that take milliseconds, some rank always lacks many.
        (1, 0.01, 150, False),
        (1, 0.01, 250, True),
    ],
)
def test_a_rank_is_behind_after_three_logging_intervals_and_two_seconds(
    every: int, seconds: float, lacks: int, is_behind: bool
) -> None:
    pace = Pace()
    pace.add(make_records(0, range(0, 1000, every), seconds))
    pace.add(make_records(1, range(0, 1000 - lacks, every), seconds))
    assert pace.slowest is not None
    assert pace.slowest.steps_behind == (lacks if is_behind else 0)
    assert pace.slowest.is_even is not is_behind


def test_the_slowest_node_is_compared_with_the_median_of_the_others() -> None:
    pace = Pace()
    for rank, seconds in enumerate((1.0, 1.1, 1.5, 1.5, 1.2, 1.2, 9.0)):
        pace.add(make_records(rank, range(5), seconds, every=2.0))
    # Rank 6 is on no known node.
    slowest = pace.find_slowest_node({0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2})
    assert slowest is not None and slowest.number == 1
    assert slowest.excess == pytest.approx(1.5 / ((1.05 + 1.2) / 2) - 1)
