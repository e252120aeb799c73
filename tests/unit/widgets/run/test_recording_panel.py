"""Tests of the row of the Run tab that records the next steps of a live run."""

from __future__ import annotations

from typing import Any

import pytest
from fake_runs import FakeRun, wait_until

import shardscope as ss
from shardscope.records.folder import RunFolder
from shardscope.records.json_files import append_line, read_lines, write_json
from shardscope_widgets import RunView
from shardscope_widgets.run import view as run_view


class RecordedRun(FakeRun):
    """A training run of two ranks; the test writes what they would."""

    trains_the_plan = True

    def profile(self, num_steps: int = 3, ranks: Any = None, **flags: bool) -> int:
        return ss.Run.profile(self, num_steps, ranks, **flags)  # type: ignore[arg-type]

    def send(self, command: str, **arguments: Any) -> None:
        append_line(RunFolder(self.folder).control, {"command": command, **arguments})


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> RecordedRun:
    monkeypatch.setattr(run_view, "GPU_SECONDS", 0.05)
    return RecordedRun([])


def write_state(run: RecordedRun, rank: int, number: int, state: str) -> None:
    path = RunFolder(run.folder).engine_report(rank)
    path.parent.mkdir(exist_ok=True)
    write_json(path, {"recording": {"number": number, "state": state}})


def test_button_requests_a_recording_and_the_row_follows_it(run: RecordedRun) -> None:
    opened: list[Any] = []
    view = RunView(run, on_open_trace=opened.append)  # type: ignore[arg-type]
    panel = view.recording
    assert panel is not None and wait_until(lambda: panel.layout.display == "")
    assert panel.button.description == "Profile the next 3 steps"
    panel.steps.value, panel.ranks.value = "5", "1"
    assert panel.button.description == "Profile the next 5 steps"
    panel.options["memory"].value = True
    panel.button.click()
    (command,) = read_lines(RunFolder(run.folder).control)
    expected = {"command": "profile", "steps": 5, "ranks": [1], "recording": 1, "memory": True}
    assert expected.items() <= command.items() and command["stacks"] is False
    assert wait_until(lambda: panel.button.disabled and "0 of 1 ranks written" in panel.words.value)
    assert panel.open_button.layout.display == "none"
    write_state(run, 1, 1, "written")
    assert wait_until(lambda: "Recording 1, 5 steps: written by 1 rank" in panel.words.value)
    assert wait_until(lambda: not panel.button.disabled and panel.open_button.layout.display == "")
    panel.open_button.click()
    assert opened == [run]
    run.status = "finished"
    assert wait_until(lambda: panel.layout.display == "none")


def test_second_stop_is_possible_while_the_first_waits_for_the_trace(
    run: RecordedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = RunView(run)  # type: ignore[arg-type]
    write_state(run, 1, 1, "recording")
    append_line(RunFolder(run.folder).control, {"command": "profile", "steps": 5, "recording": 1})
    assert wait_until(lambda: not view.stop_button.disabled)
    pressed: list[str] = []

    def press(button: str) -> None:
        pressed.append(button)
        run.status = "stopping"

    run.press = press  # type: ignore[method-assign,assignment]
    monkeypatch.setattr(run_view, "SECOND_STOP_SECONDS", 60.0)
    view.stop_button.click()
    assert wait_until(lambda: view.status == "stopping")
    view.refresh()
    view.stop_button.click()
    assert pressed == ["Stop"] and view.stop_button.disabled, "a double click does not lose the trace"
    monkeypatch.setattr(run_view, "SECOND_STOP_SECONDS", 0.0)
    assert wait_until(lambda: not view.stop_button.disabled)
    write_state(run, 1, 1, "written")
    view.stop_button.click()
    assert pressed == ["Stop", "Stop"] and view.stop_button.disabled
    run.status = "stopped"


def test_run_that_waits_in_a_queue_takes_a_request(run: RecordedRun) -> None:
    run.status = "queued"
    view = RunView(run)  # type: ignore[arg-type]
    panel = view.recording
    assert panel is not None and wait_until(lambda: panel.layout.display == "" and not panel.button.disabled)
    panel.button.click()
    assert [command["command"] for command in read_lines(RunFolder(run.folder).control)] == ["profile"]


def test_refused_request_is_shown_as_text(run: RecordedRun) -> None:
    view = RunView(run)  # type: ignore[arg-type]
    panel = view.recording
    assert panel is not None and wait_until(lambda: panel.layout.display == "")
    for steps, ranks, message in (
        ("0", "all", "num_steps is 0; allowed: a whole number from 1 to 1,000"),
        ("many", "all", "num_steps is"),
        ("3", "0, 7", "ranks is 7; allowed: a whole number from 0 to 1"),
        ("3", "<b>", "&lt;b&gt;"),
    ):
        panel.steps.value, panel.ranks.value = steps, ranks
        panel.button.click()
        assert message in panel.words.value and "ss-error" in panel.words.value
        assert not RunFolder(run.folder).control.exists()
    run.trains_the_plan = False
    panel.ranks.value = "all"
    panel.button.click()
    assert "without step boundaries" in panel.words.value
    run.status = "stopped"
