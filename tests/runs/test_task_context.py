"""Tests of the ``ctx`` of a task, without a launch."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from tests.requirements import needs

from shardscope.records.folder import RunFolder
from shardscope.records.json_files import append_line, read_json, read_lines

torch = needs("torch")

from shardscope.records.private_file import open_private_file  # noqa: E402
from shardscope.runs.launch import context as context_module  # noqa: E402
from shardscope.runs.launch.commands import NUM_SLOTS, CommandFeed, PollTable  # noqa: E402
from shardscope.runs.launch.context import Context  # noqa: E402


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "run")
    made.create()
    return made


def make_context(folder: RunFolder) -> Context:
    return Context(rank=0, world_size=1, device=torch.device("cpu"), plan=None, folder=folder)


def test_log_counts_steps_and_takes_one_value_each(folder: RunFolder) -> None:
    context = make_context(folder)
    context.log(loss=torch.tensor([1.5]), count=torch.tensor(3), flag=True)
    context.log(step=10, loss=2)
    context.log(loss=3)
    events = read_lines(folder.events(0))
    assert [event["step"] for event in events] == [0, 10, 11]
    assert events[0]["loss"] == 1.5 and events[0]["count"] == 3 and events[0]["flag"] is True
    with pytest.raises(ValueError, match=r"loss is a Tensor.*float\(loss\.mean\(\)\)"):
        context.log(loss=torch.ones(2))
    with pytest.raises(ValueError, match="'rank'"):
        context.log(rank=1)
    context.close()


def test_fault_23_a_full_disk_costs_metrics_only(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.events(0).symlink_to("/dev/full")
    context = make_context(folder)
    context.log(loss=1.0)
    assert "metrics of step 0 were not written: [Errno 28]" in capsys.readouterr().err
    context.log(loss=1.5)
    assert not capsys.readouterr().err, "the first one says it"
    context.close()
    folder.events(0).unlink()
    context.log(loss=2.0)
    assert [event["loss"] for event in read_lines(folder.events(0))] == [2.0]
    assert "2 lines of metrics before step 2 were not written" in capsys.readouterr().err
    context.close()


def test_fault_23_a_full_disk_costs_records_only(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A built-in task writes its last record after the last step: such a run failed at its end."""

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    context = make_context(folder)
    with monkeypatch.context() as full:
        full.setattr(context_module, "write_json", fail)
        context.record("data", {"num_steps_done": 4})
    assert "the record 'data' was not written: [Errno 28]" in capsys.readouterr().err
    context.record("export", {"num_steps_done": 4})
    assert sorted(read_json(folder.engine_report(0)) or {}) == ["data", "export"]


def test_ranks_agree_on_commands_although_one_runs_ahead(folder: RunFolder) -> None:
    descriptor, path = open_private_file(folder.path)
    PollTable.allocate(descriptor)
    ahead, behind = (CommandFeed(folder, PollTable(path)) for _ in range(2))
    seen_ahead = [ahead.poll() for _ in range(3)]
    append_line(folder.control, {"command": "stop"})
    # The other one could see the command already at its first poll, but leaves with the first.
    seen_behind = [behind.poll() for _ in range(3)]
    assert seen_ahead == seen_behind == [[], [], []]
    assert behind.poll() == ahead.poll() == [{"command": "stop"}]
    for _ in range(2 * NUM_SLOTS):
        assert ahead.poll() == behind.poll() == []
    append_line(folder.control, {"command": "profile"})
    assert ahead.poll() == behind.poll() == [{"command": "profile"}]
    assert os.fstat(descriptor).st_size < 2**16, "a long run needs no more of it"
    os.close(descriptor)


def test_should_stop_keeps_other_commands(folder: RunFolder) -> None:
    context = make_context(folder)
    assert not context.should_stop
    append_line(folder.control, {"command": "profile", "steps": 3})
    append_line(folder.control, {"command": "stop", "checkpoint": True})
    assert context.should_stop and context.should_stop
    assert [command["command"] for command in context.commands()] == ["profile"]
    assert context.commands() == []


def test_unread_commands_are_bounded(folder: RunFolder) -> None:
    context = make_context(folder)
    for batch in range(3):
        for number in range(700):
            append_line(folder.control, {"command": "profile", "number": 700 * batch + number})
        assert not context.should_stop
    assert [command["number"] for command in context.commands()] == list(range(1100, 2100))
    append_line(folder.control, {"command": "profile", "number": 5000})
    assert [command["number"] for command in context.commands()] == [5000]


def test_engine_records_of_several_names_are_kept(folder: RunFolder) -> None:
    context = make_context(folder)
    context.record("engine", {"shards": 2})
    context.record("kernels", {"attention": "sdpa"})
    kept = json.loads(folder.engine_report(0).read_text())
    assert kept == {"engine": {"shards": 2}, "kernels": {"attention": "sdpa"}}
    with pytest.raises(ValueError, match="steps"):
        context.profile(steps=0)
