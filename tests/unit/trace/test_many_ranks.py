"""Tests of folders of many ranks: their columns are read when needed, and the summary takes little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from tests.faults import slow_test
from tests.unit.trace.trace_events import Events, all_reduce, kernel, load_ranks, operator, step, write_ranks

from shardscope.trace import Trace
from shardscope.trace.loading.rank_columns import RankColumns
from shardscope.trace.loading.ranks import read_ranks
from shardscope.trace.summary import many_ranks
from shardscope.trace.summary.many_ranks import MAX_TOGETHER, choose_ranks
from shardscope.trace.summary.summary import summarize

NUM_RANKS = MAX_TOGETHER + 8


def make_rank(rank: int) -> Events:
    """Return two steps of 1 us; rank 7 computes longest."""
    events: Events = []
    for number in range(2):
        begin, compute = 1000 * number + rank, 400 + 100 * (rank == 7)
        events += [
            step(number, begin, begin + 1000),
            kernel(begin, begin + compute),
            all_reduce(begin + compute, begin + 800),
            operator(begin + 100, begin + 200, f"aten::op{rank % 3}"),
        ]
    return events


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    return load_ranks(tmp_path, {rank: make_rank(rank) for rank in range(NUM_RANKS)})


def test_the_tables_are_those_of_all_ranks_together(trace: Trace) -> None:
    together, summary = summarize(trace), trace.summary()
    assert list(summary.ranks) == list(together.ranks)
    assert sorted(
        (row["name"], row["slices"], round(row["total_seconds"] * 1e9)) for row in summary.operators
    ) == (
        sorted((row["name"], row["slices"], round(row["total_seconds"] * 1e9)) for row in together.operators)
    )
    assert f"{NUM_RANKS} ranks" in summary.sentences[0]
    assert len(summary.sentences) > 3


def test_the_names_of_each_recording_are_searched_for_steps_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for each other rank, 128 ranks took five times as long to load, and 512 more than a minute."""
    searched: list[RankColumns] = []

    def note_search(rank: RankColumns) -> frozenset[int]:
        searched.append(rank)
        return frozenset((1, 2))

    monkeypatch.setattr("shardscope.trace.loading.ranks._list_steps", note_search)
    for cycle in range(2):
        for path in write_ranks(tmp_path / "new", {rank: make_rank(rank) for rank in range(8)}).iterdir():
            path.rename(tmp_path / f"cycle-{cycle}-{path.name}")
    assert len(read_ranks(tmp_path)[0]) == 8
    assert len(searched) == 2 * 8


def test_some_ranks_are_a_trace_on_the_same_axis(trace: Trace) -> None:
    some = trace.select_ranks([9, 3])
    assert (some.ranks, some.world_size, len(some)) == ([3, 9], NUM_RANKS, 16)
    assert int(some.start_ns.min()) == 3
    kept = np.isin([track.rank for track in trace.tracks], some.ranks)[trace.track_index]
    assert np.array_equal(some.start_ns, trace.start_ns[kept])
    with pytest.raises(ValueError, match=r"Rank 99 was not recorded.*Fix:"):
        trace.select_ranks([1, 99])
    with pytest.raises(ValueError, match=r"\[9\]"):
        trace.select_ranks(9)  # type: ignore[arg-type]
    assert "1 rank," in repr(trace.select_ranks([9]))


def test_slowest_and_fastest_ranks_are_compared() -> None:
    chosen = choose_ranks({rank: 1.0 + rank % 50 for rank in range(200)} | {17: 99.0, 60: 0.1})
    assert {17, 60} <= set(chosen) and len(chosen) == 8
    assert choose_ranks({4: 1.0, 2: 2.0}) == [2, 4]


def test_the_rank_that_the_others_wait_for_is_compared(tmp_path: Path) -> None:
    """Collectives make all steps as long as the straggler's: they say nothing of which rank it is."""
    ranks: dict[int, Events] = {}
    for rank in range(NUM_RANKS):
        ranks[rank] = []
        for number in range(20):
            begin, work = 10_000 * number, 4000 + 3000 * (rank == 23)
            named = {"Collective name": "allreduce", "Process Group Name": "0", "Group size": NUM_RANKS}
            ranks[rank] += [
                step(number, begin, begin + 10_000),
                kernel(begin, begin + work),
                all_reduce(begin + work, begin + 9000 + rank, **named),
            ]
    sentences = load_ranks(tmp_path, ranks).summary().sentences
    assert "on all of them" in sentences[0]
    assert any(text.startswith("Stragglers: rank 23 arrives") for text in sentences)


def test_a_truncated_file_is_named_though_its_rank_is_not_compared(tmp_path: Path) -> None:
    """Rank 23 stays in the middle of all: the sentences compare other ranks, and the tables have it."""
    ranks: dict[int, Events] = {}
    for rank in range(NUM_RANKS):
        ranks[rank] = [step(0, 0, 20_000 + 100 * rank), kernel(0, 10_000), operator(0, 10)]
    folder = write_ranks(tmp_path, ranks)
    path = folder / "rank-23.json"
    path.write_bytes(path.read_bytes().partition(b"aten::mm")[0])
    first, *others = Trace.load(folder).summary().sentences
    assert "compare ranks 0, 6, 11, 17, 22, 28, 33, 39." in first
    assert any("The file of rank 23 ends in the middle" in sentence for sentence in others)
    # No rank waits for another one here.
    assert "wait" not in first and "longest and shortest steps" in first


def test_the_summary_holds_one_rank_at_a_time_and_then_those_compared(
    trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a rank's number of steps: two ranks are compared where eight have too many slices."""
    selected: list[list[int]] = []
    alive: list[weakref.ref[Trace]] = []
    held: list[int] = []
    select = Trace.select_ranks

    def select_ranks(self: Trace, ranks: Iterable[int]) -> Trace:
        held.append(sum("start_ns" in vars(one) for ref in alive if (one := ref()) is not None))
        chosen = select(self, ranks)
        selected.append(chosen.ranks)
        alive.append(weakref.ref(chosen))
        return chosen

    monkeypatch.setattr(Trace, "select_ranks", select_ranks)
    monkeypatch.setattr(many_ranks, "MAX_COMPARED_SLICES", 20)
    text = trace.summary().sentences[0]
    assert selected[:-1] == [[rank] for rank in range(NUM_RANKS)]
    assert len(selected[-1]) == 2 and f"compare ranks {selected[-1][0]}, {selected[-1][1]}." in text
    assert held == [0] * len(selected)
    assert "start_ns" not in vars(trace), "the columns of all ranks together"


def test_names_of_steps_are_kept_once_for_all_ranks(tmp_path: Path) -> None:
    ranks = {rank: [step(n, 1000 * n, 1000 * n + 900) for n in range(50)] for rank in range(4)}
    trace = load_ranks(tmp_path, ranks)
    names = [name for rank in trace._columns._ranks for name in rank.texts.names]
    assert len(names) == 200 and len({id(name) for name in names}) == 50


_MEASURE = """
import resource, sys
from shardscope.trace import Trace
from shardscope.trace.analysis import breakdown, kernels
from shardscope.trace.summary import many_ranks
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
trace = Trace.load(sys.argv[1])
summary = trace.summary()
print(len(trace), len(summary.ranks), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@slow_test
def test_fault_38_the_summary_of_100_ranks_takes_the_memory_of_a_few(tmp_path: Path) -> None:
    """Two million slices: their columns have 90 MB, and what is derived from them several times that."""
    events = [*make_rank(0), *(operator(1000 * i, 1000 * i + 500, "aten::add") for i in range(19_992))]
    first = tmp_path / "rank-0.json"
    first.write_text(json.dumps({"traceEvents": events}))
    for rank in range(1, 100):
        os.link(first, tmp_path / f"rank-{rank}.json")
    command = [sys.executable, "-c", _MEASURE, str(tmp_path)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    num_slices, num_ranks, growth_mib = map(int, output.split())
    assert (num_slices, num_ranks) == (2_000_000, 100)
    assert growth_mib < 80
