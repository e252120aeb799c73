"""Tests of one time axis for all ranks: by the clock, by collectives, by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.trace.trace_events import (
    BASE_NS,
    COMMUNICATION_NAME,
    Events,
    all_reduce,
    annotation,
    kernel,
    launch,
    operator,
    step,
    to_ns,
)

from shardscope.trace import Trace

FIXTURES = Path(__file__).parents[2] / "fixtures"
RUNS = FIXTURES / "traces_of_runs"
SECOND = 10**9


def write_ranks(folder: Path, ranks: dict[int, Events], late_ns: dict[int, int], **more: Any) -> Path:
    """Write ranks whose hosts' clocks are late by ``late_ns``."""
    for rank, events in ranks.items():
        data = {
            "traceEvents": events,
            "distributedInfo": {"rank": rank, "world_size": len(ranks)},
            "baseTimeNanoseconds": BASE_NS + late_ns.get(rank, 0),
            **more,
        }
        (folder / f"rank-{rank}.json").write_text(json.dumps(data))
    return folder


def copy_with_clocks(run: Path, folder: Path, late_ns: dict[int, int]) -> Path:
    """Copy recorded ranks as hosts would have recorded them whose clocks are late."""
    for path in sorted(run.glob("*.json.gz")):
        data = json.loads(gzip.decompress(path.read_bytes()))
        data["baseTimeNanoseconds"] += late_ns.get(data["distributedInfo"]["rank"], 0)
        (folder / path.name.removesuffix(".gz")).write_text(json.dumps(data))
    return folder


def find_starts(trace: Trace, name: str) -> dict[int, list[int]]:
    """Return the starts of slices with this name, by rank."""
    index = np.flatnonzero(trace.name_index == trace.names.index(name))
    starts: dict[int, list[int]] = {}
    for position in index.tolist():
        rank = trace.tracks[trace.track_index[position]].rank
        starts.setdefault(rank, []).append(int(trace.start_ns[position]))
    return {rank: sorted(times) for rank, times in starts.items()}


def gpu_rank(rank: int, num_steps: int = 3, first_step: int = 0) -> Events:
    """Steps of 1 ms: both ranks leave each all-reduce together, rank 1 arrives later."""
    events: Events = []
    for number in range(first_step, first_step + num_steps):
        begin, ids = number * 1_000_000, 10 * number
        events += [
            step(number, begin, begin + 1_000_000),
            launch(begin + 10, begin + 20, ids),
            launch(begin + 30, begin + 40, ids + 1),
            kernel(begin + 100, begin + 300_000, correlation=ids),
            all_reduce(begin + 310_000 + 50_000 * rank, begin + 600_000, correlation=ids + 1),
        ]
    return events


@pytest.mark.parametrize("late", [2 * SECOND, -7 * SECOND, 600_000])
def test_collectives_align_ranks_whose_clocks_differ(tmp_path: Path, late: int) -> None:
    folder = write_ranks(tmp_path, {0: gpu_rank(0), 1: gpu_rank(1)}, {1: late})
    trace = Trace.load(folder, align="collectives")
    starts = find_starts(trace, COMMUNICATION_NAME)
    assert [b - a for a, b in zip(starts[0], starts[1], strict=True)] == [50_000] * 3
    (note,) = trace.notes
    assert "aligned by 3 or more collectives" in note and f"rank 1 by {-late / 1e9:+.6g} s" in note


@pytest.mark.parametrize("late", [3 * SECOND, -5 * SECOND])
@pytest.mark.parametrize("run", ["ddp", "zero3", "megatron"])
def test_recorded_ranks_are_aligned_to_a_millisecond(tmp_path: Path, run: str, late: int) -> None:
    """Recorded over gloo on one clock; a copy of rank 1 has another."""
    before = Trace.load(RUNS / run / "traces")
    folder = copy_with_clocks(RUNS / run / "traces", tmp_path, {1: late})
    # Clocks that differ by more than the recording lasts are corrected without ``align``.
    for trace in (Trace.load(folder), Trace.load(folder, align="collectives")):
        assert len(trace) == len(before)
        first, last = (int(np.argmax(trace.track_index == track)) for track in (0, len(trace.tracks) - 1))
        moved = (trace.start_ns[last] - trace.start_ns[first]) - (
            before.start_ns[last] - before.start_ns[first]
        )
        assert abs(int(moved)) < 3_000_000
        assert any("do not overlap: aligned by" in note for note in trace.notes)


def test_a_recording_that_began_a_step_later_is_aligned_by_step(tmp_path: Path) -> None:
    ranks = {0: gpu_rank(0, 4), 1: gpu_rank(1, 4, first_step=1)}
    trace = Trace.load(write_ranks(tmp_path, ranks, {1: 9 * SECOND}), align="collectives")
    starts = find_starts(trace, COMMUNICATION_NAME)
    assert starts[1][0] - starts[0][1] == 50_000


def test_ranks_without_a_common_group_are_aligned_through_others(tmp_path: Path) -> None:
    """Pairs (0, 1), (2, 3) for one group and (0, 2) for another: 0 and 3 have none in common."""

    def call(end: int, *members: int) -> dict[str, Any]:
        return all_reduce(
            end - 100, end, **{"Collective name": "allreduce", "Process Group Ranks": str(list(members))}
        )

    ranks = {
        0: [call(1_000, 0, 1), call(9_000, 0, 2)],
        1: [call(1_000, 0, 1)],
        2: [call(2_500, 2, 3), call(9_000, 0, 2)],
        3: [call(2_500, 2, 3)],
    }
    late = {1: SECOND, 2: 3 * SECOND, 3: -4 * SECOND}
    trace = Trace.load(write_ranks(tmp_path, ranks, late), align="collectives")
    assert find_starts(trace, COMMUNICATION_NAME) == {0: [0, 8_000], 1: [0], 2: [1_500, 8_000], 3: [1_500]}


def test_ranks_are_aligned_though_rank_0_has_no_collectives(tmp_path: Path) -> None:
    alone = [operator(0, 100_000, "aten::add")]
    ranks = {0: alone, 1: gpu_rank(0), 2: gpu_rank(1)}
    trace = Trace.load(write_ranks(tmp_path, ranks, {1: SECOND, 2: 9 * SECOND}))
    starts = find_starts(trace, COMMUNICATION_NAME)
    assert starts[2][0] - starts[1][0] == 50_000 and find_starts(trace, "aten::add") == {0: [0]}
    assert "aligned by 3 or more collectives" in trace.notes[0] and "rank 2 by -8 s" in trace.notes[0]
    assert "rank 0: no collectives in common with rank 1, begins with it" in trace.notes[1]


def test_clocks_that_differ_within_the_recording_are_noted(tmp_path: Path) -> None:
    ranks = {rank: gpu_rank(rank, 50) for rank in (0, 1)}
    trace = Trace.load(write_ranks(tmp_path, ranks, {1: 20_000_000}))
    (note,) = trace.notes
    assert "clocks differ from that of rank 0" in note and "rank 1 by +0.02 s" in note
    assert "align='collectives'" in note
    assert Trace.load(write_ranks(tmp_path, ranks, {1: 100_000})).notes == []
    # Rank 0 without collectives is compared with none.
    alone = [operator(0, 100_000), operator(45_000_000, 45_100_000)]
    ranks = {0: alone, 1: gpu_rank(0, 50), 2: gpu_rank(1, 50)}
    note = Trace.load(write_ranks(tmp_path, ranks, {2: 20_000_000})).notes[0]
    assert "clocks differ from that of rank 1" in note and "rank 2 by +0.02 s" in note


def test_ranks_are_moved_by_hand(tmp_path: Path) -> None:
    ranks = {rank: [operator(0, 100)] for rank in (0, 1)}
    folder = write_ranks(tmp_path, ranks, {1: 2 * SECOND})
    trace = Trace.load(folder, align={1: -1.5})
    assert find_starts(trace, "aten::mm") == {0: [0], 1: [to_ns(0.5)]}
    assert trace.notes == ["moved by hand: rank 1 by -1.5 s"]
    assert find_starts(Trace.load(folder, align={}), "aten::mm") == {0: [0], 1: [2 * SECOND]}


@pytest.mark.parametrize(
    "align", ["time", None, {7: 1.0}, {0: float("nan")}, {0: "1"}, {0: True}, {0: 1e300}]
)
def test_other_alignments_are_refused(tmp_path: Path, align: Any) -> None:
    folder = write_ranks(tmp_path, {0: [operator(0, 100)]}, {})
    with pytest.raises(ValueError, match="Fix: "):
        Trace.load(folder, align=align)


def test_ranks_without_collectives_keep_their_clocks(tmp_path: Path) -> None:
    ranks = {rank: [operator(0, 100_000)] * 2 for rank in (0, 1)}
    ranks[0].append(annotation(0, 50, "gloo:all_reduce"))
    trace = Trace.load(write_ranks(tmp_path, ranks, {1: 0}), align="collectives")
    assert any("no collectives in common" in note for note in trace.notes)
    assert find_starts(trace, "aten::mm") == {0: [0, 0], 1: [0, 0]}


def test_ranks_without_a_wall_clock_start_at_zero_with_a_note(tmp_path: Path) -> None:
    ranks = {0: [operator(5_000_000, 5_000_010)], 1: [operator(900_000, 900_010)]}
    for rank, events in ranks.items():
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps({"traceEvents": events}))
    trace = Trace.load(tmp_path)
    assert trace.start_ns.tolist() == [0, 0]
    assert any("no wall clock" in note for note in trace.notes)


def test_ranks_recorded_minutes_apart_start_at_zero_with_a_note(tmp_path: Path) -> None:
    ranks = {rank: [operator(0, 10_000)] for rank in (0, 1)}
    trace = Trace.load(write_ranks(tmp_path, ranks, {1: 90 * SECOND}))
    assert trace.duration_ns_total == 10_000
    assert any("do not overlap" in note for note in trace.notes)


def test_fault_38_ranks_recorded_on_different_days_are_refused_by_name(tmp_path: Path) -> None:
    folder = write_ranks(tmp_path, {rank: gpu_rank(rank) for rank in (0, 1)}, {1: 90_000 * SECOND})
    with pytest.raises(ValueError, match=r"rank-1\.json was recorded 25\.0 hours after rank-0.*Fix:"):
        Trace.load(folder)
    # Clocks of hosts may be that wrong.
    assert Trace.load(folder, align="collectives").duration_seconds < 0.01
