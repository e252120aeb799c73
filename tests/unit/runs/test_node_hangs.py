"""Hangs of several nodes: which reports node 0 waits for, and which rank it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardscope.records.folder import NodeFolder, RunFolder
from shardscope.records.json_files import read_json, write_json
from shardscope.runs.watch.hang_reports import HangReport, build_report, describe_hang, parse_report
from shardscope.runs.watch.node_hangs import PEER_SECONDS, READ_SECONDS, NodeHangs

# As faulthandler writes them.
COLLECTIVE = (
    "Thread 0x00007f01 (most recent call first):\n"
    '  File "/env/site-packages/torch/distributed/distributed_c10d.py", line 3046 in all_reduce\n'
    '  File "/env/site-packages/torch/distributed/c10d_logger.py", line 81 in wrapper\n'
    '  File "/home/user/train.py", line 12 in train\n'
)
SLEEP = (
    "Thread 0x00007f02 (most recent call first):\n"
    '  File "/home/user/train.py", line 7 in read_batch\n'
    '  File "/home/user/train.py", line 11 in train\n'
)


@pytest.fixture
def nodes(tmp_path: Path) -> tuple[NodeFolder, NodeFolder]:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    (folder.path / "nodes").mkdir()
    parts = NodeFolder(folder.path, 0, 2), NodeFolder(folder.path, 1, 2)
    for part, name in zip(parts, ("a", "b"), strict=True):
        part.create_own()
        write_json(part.node_json, {"name": name})
    return parts


def make_report(rank: int, stack: str, step: int = 11, **more: object) -> HangReport:
    fields = {"hangs": True, "waited": 61.0, "median": 0.1, "steps": {rank: step}, **more}
    return build_report("steps", {rank: stack}, **fields)  # type: ignore[arg-type]


def test_a_report_is_read_as_it_was_written(nodes: tuple[NodeFolder, NodeFolder]) -> None:
    report = make_report(1, SLEEP)
    node = NodeHangs(nodes[1], 2)
    assert node.check(report, "its own message", 1.0) == "its own message"
    assert parse_report((read_json(nodes[1].hang) or {})["report"]) == report
    node.check(None, None, 1.0)
    assert (read_json(nodes[1].hang) or {})["report"] is None
    for damaged in (None, [], {"waited": "long"}, {"waited": 1, "median": 1, "steps": [1], "waiting": 3}):
        assert parse_report(damaged) in (None, HangReport("activity", False, 1.0, 1.0, {}, {}, [], {}))


def test_fault_82_node_0_names_the_rank_that_is_behind(nodes: tuple[NodeFolder, NodeFolder]) -> None:
    lead, other = NodeHangs(nodes[0], 2), NodeHangs(nodes[1], 2)
    # By the steps, or by who waits for whom.
    for step, clause in ((10, "rank 1 on node 1 (b) is 1 step behind"), (11, "")):
        assert lead.check(make_report(0, COLLECTIVE), "its own message", 1.0) is None
        other.check(make_report(1, SLEEP, step), "", 1.0)
        message = lead.check(make_report(0, COLLECTIVE), None, 1.0)
        assert message is not None and message.startswith("no step for 61 s, while a step takes 0.1 s")
        assert (clause or "in a collective rank 0 waits for rank 1 on node 1 (b)") in message, message
        assert message.index("rank 1: read_batch (train.py:7)") < message.index("rank 0: all_reduce")
        assert lead.hangs
        # It is reported once, and its end too.
        assert lead.check(make_report(0, COLLECTIVE), None, 1.0) is None
        other.check(None, None, 1.0)
        assert lead.check(None, "steps are logged again", 1.0) == "the ranks make progress again"
        assert not lead.hangs
        assert lead.check(None, None, 1.0) is None


def test_a_busy_rank_of_another_node_explains_the_delay(nodes: tuple[NodeFolder, NodeFolder]) -> None:
    lead, other = NodeHangs(nodes[0], 2), NodeHangs(nodes[1], 2)
    other.check(make_report(1, SLEEP, hangs=False, busy={1: "at a checkpoint"}), None, 1.0)
    for _ in range(100):
        assert lead.check(make_report(0, COLLECTIVE), "its own message", 1.0) is None
    # Until it takes too long for that.
    other.check(make_report(1, SLEEP, busy={1: "at a checkpoint"}), "", 1.0)
    message = lead.check(make_report(0, COLLECTIVE), None, 1.0)
    assert message is not None and "rank 1 is at a checkpoint" in message


def test_a_node_that_answers_late_or_never(nodes: tuple[NodeFolder, NodeFolder]) -> None:
    lead, other = NodeHangs(nodes[0], 2), NodeHangs(nodes[1], 2)
    # Its ranks make progress by themselves: node 0 alone hangs, and says so after a while.
    messages = [lead.check(make_report(0, SLEEP), None, 1.0) for _ in range(int(PEER_SECONDS))]
    assert messages[:-1] == [None] * (len(messages) - 1) and "rank 0: read_batch" in str(messages[-1])
    other.check(make_report(1, SLEEP), None, 1.0)
    assert "rank 1: read_batch" in str(lead.check(make_report(0, SLEEP), None, 1.0))
    # The other way round: only the other node hangs.
    lead = NodeHangs(nodes[0], 2)
    messages = [lead.check(None, None, 1.0) for _ in range(int(PEER_SECONDS + READ_SECONDS))]
    assert [message for message in messages if message] == [describe_hang(make_report(1, SLEEP))]
    # One whose ranks have ended is not waited for.
    lead = NodeHangs(nodes[0], 2)
    write_json(nodes[1].ended, {"status": "finished"})
    assert "rank 0: read_batch" in str(lead.check(make_report(0, SLEEP), None, 1.0))


def test_a_silent_node_is_no_standstill_while_another_works(nodes: tuple[NodeFolder, NodeFolder]) -> None:
    lead, other = NodeHangs(nodes[0], 2), NodeHangs(nodes[1], 2)
    silent = [build_report("activity", {rank: SLEEP}, hangs=True, waited=600.0) for rank in (0, 1)]
    for _ in range(100):  # It waits for what the other node prepares.
        assert lead.check(silent[0], "no activity", 1.0) is None
    other.check(silent[1], "", 1.0)
    message = lead.check(silent[0], None, 1.0)
    assert message is not None and message.startswith("no activity for 600 s") and "rank 1:" in message
