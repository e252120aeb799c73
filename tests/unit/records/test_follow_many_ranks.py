"""A reader of many ranks' metrics reads them in several calls, of which each keeps little in memory."""

from __future__ import annotations

import json
from pathlib import Path

from shardscope.records.folder import RunFolder
from shardscope.records.follow import CALL_BYTES, Follow

NUM_RANKS, NUM_STEPS = 64, 2_000


def test_many_ranks_are_read_in_bounded_calls_and_nothing_is_lost(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    for rank in range(NUM_RANKS):
        lines = (json.dumps({"step": step, "rank": rank, "text": "x" * 80}) for step in range(NUM_STEPS))
        folder.events(rank).write_text("".join(f"{line}\n" for line in lines))
    # The longest line and one rank's piece may come on top.
    largest = 2 * CALL_BYTES // 100
    follow, steps = Follow(folder, NUM_RANKS), dict.fromkeys(range(NUM_RANKS), -1)
    calls = 0
    while True:
        records = follow.read()
        calls += 1
        assert len(records) < largest
        for record in records:
            rank, step = record["rank"], record["step"]
            assert isinstance(rank, int) and step == steps[rank] + 1, "in the order of logging"
            steps[rank] += 1
        if not follow.is_behind:
            break
    assert calls > 1
    assert set(steps.values()) == {NUM_STEPS - 1}


def test_a_rank_that_always_logs_keeps_no_other_from_being_read(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    lines = [json.dumps({"step": 0, "rank": rank, "text": "x" * 900}) + "\n" for rank in range(32)]
    for rank in range(32):
        folder.events(rank).write_text(lines[rank] * 1_000)
    follow, seen = Follow(folder, 32), set()
    for _ in range(8):
        for rank in range(8):  # These eight alone fill a call, and log as much again before the next one.
            with folder.events(rank).open("a") as events:
                events.write(lines[rank] * 1_000)
        seen |= {record["rank"] for record in follow.read()}
    assert seen == set(range(32))
