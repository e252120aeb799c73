"""Tests of tables and comparisons of runs, from folders as real runs leave them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import shardscope as ss
from shardscope.records.folder import RunFolder
from shardscope.records.json_files import append_line, write_json
from shardscope.runs.backends import this_machine
from shardscope.runs.explain import compare


def write_run_folder(
    parent: Path, name: str, plan: ss.Plan, *, step_seconds: float = 1.0, loss: float = 1.0, **more: Any
) -> Path:
    folder = RunFolder(parent / name)
    folder.create()
    description = {"world_size": 2, "created": more.pop("created", 1.0), "plan": json.loads(plan.to_json())}
    write_json(folder.run_json, {**description, **more})
    append_line(folder.status, {"time": 1_800_000_000.0, "status": "starting", "reason": "coming up"})
    append_line(folder.status, {"time": 1_800_000_042.0, "status": "finished", "reason": "done"})
    for rank in range(2):
        for step in range(10):
            line = {"step": step, "rank": rank, "time": 0.0, "loss": loss + rank - step / 100}
            append_line(folder.events(rank), {**line, "step_seconds": step_seconds})
        phases = {"rest": {"parameters": 2**20}, "forward": {"parameters": 2**20, "activations": 2**24}}
        memory = {"device": "cpu", "step": 2, "rss_before_steps": 2**28, "phases": phases}
        write_json(folder.engine_report(rank), {"memory": memory})
    return folder.path


def make_plan(**recipe: Any) -> ss.Plan:
    cluster = ss.Cluster.parse("2xcpu")
    return ss.Plan(ss.Architecture.of_size("2m"), cluster, ss.Recipe(seq_len=64, **recipe), ss.Layout.ddp())


@pytest.fixture
def two_runs(tmp_path: Path) -> Path:
    predicted = {"step_seconds": 0.3, "from": "catalogue"}
    write_run_folder(tmp_path, "a", make_plan(), step_seconds=0.2, loss=5.0, predicted=predicted)
    other = make_plan(recompute="full")
    write_run_folder(tmp_path, "b<i>", other, step_seconds=0.4, loss=3.0, created=2.0)
    return tmp_path


def test_a_first_step_without_optimizer_state_is_no_memory_error(tmp_path: Path) -> None:
    folder = RunFolder(write_run_folder(tmp_path, "a", make_plan()))
    for rank in range(2):
        record = json.loads(folder.engine_report(rank).read_text())
        for phase in record["memory"]["phases"].values():
            phase["optimizer"] = 0
        write_json(folder.engine_report(rank), record)
    frame = ss.runs(tmp_path).to_frame()
    assert frame["tensors_gib"][0] > 0 and frame["memory_error"].isna()[0]


def test_table_of_runs_has_measurements_and_errors(two_runs: Path) -> None:
    runs = ss.runs(two_runs)
    frame = runs.to_frame()
    assert list(frame["run"]) == ["a", "b<i>"] and list(frame["status"]) == ["finished", "finished"]
    assert list(frame["seconds"]) == [42.0, 42.0] and list(frame["steps"]) == [10, 10]
    assert list(frame["loss"]) == pytest.approx([5.41, 3.41])
    assert frame["step_error"][0] == pytest.approx(0.5) and frame["step_error"].isna()[1]
    measured = runs[0].memory()
    assert frame["tensors_gib"][0] == pytest.approx(measured.tensor_bytes / 2**30)
    assert frame["memory_error"][0] == pytest.approx(measured.error)
    html = runs._repr_html_()
    assert ">+50 %</td>" in html and ">–</td>" in html and "b&lt;i&gt;" in html and "<i>" not in html
    assert "min-width:6em'>started</th>" in html
    assert "container-type:inline-size" in html and "cqw" in html, "on paper, a wide table is smaller"
    assert "predicted step seconds" in html
    assert "step error" not in runs[1]._repr_html_(), "columns without a value need space"
    assert ss.runs(two_runs / "a")._repr_html_() == "<p>No runs here.</p>"
    missing = two_runs / "typo"
    assert ss.runs(missing)._repr_html_() == f"<p>No runs here: {missing} does not exist.</p>"
    assert [record["status"] for record in runs[0].history] == ["starting", "finished"]


def test_compare_reports_differences_and_curves_of_two_runs(two_runs: Path) -> None:
    runs = ss.runs(two_runs)
    pair = runs.compare("b<i>", runs[0])
    assert pair.differences == ["recompute full → none"]
    assert list(pair.to_frame().columns) == ["b<i>", "a"] and pair.to_frame().loc["ranks", "a"] == 2
    curves = pair.curves()
    assert list(curves.columns) == ["b<i>", "a"] and curves.loc[0, "a"] == 5.5 and len(curves) == 10
    assert "recompute full → none" in pair._repr_html_()
    again = ss.runs(two_runs).compare(ss.Run.attach(two_runs / "a"), "b<i>").runs
    assert [run.name for run in again] == ["a", "b<i>"]
    for stranger in (ss.Run.attach(write_run_folder(two_runs / "elsewhere", "a", make_plan())), 7):
        with pytest.raises(ValueError, match=r"compare run is .*allowed: one of these: a, b<i>"):
            runs.compare(stranger, "a")
    with pytest.raises(ValueError, match=r"compare run is 'c'; allowed: .*b<i>"):
        runs.compare("a", "c")
    with pytest.raises(
        ValueError, match=re.escape("curves metric is 'los'; allowed: what was logged: loss, step_")
    ):
        pair.curves("los")


def test_duration_of_a_running_run_lasts_until_now(two_runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (two_runs / "a" / "status.jsonl").read_text().replace("finished", "running")
    (two_runs / "a" / "status.jsonl").write_text(lines)
    write_json(two_runs / "a" / "supervisor.json", {"pid": 1, "started": 1.0, "machine": "another"})
    monkeypatch.setattr(compare.time, "time", lambda: 1_800_000_100.0)
    assert list(ss.runs(two_runs).to_frame()["seconds"]) == [100.0, 42.0]


def test_unreadable_plan_is_reported(two_runs: Path) -> None:
    description = json.loads((two_runs / "a" / "run.json").read_text())
    write_json(two_runs / "a" / "run.json", {**description, "plan": {"version": -1}})
    runs = ss.runs(two_runs)
    assert runs.to_frame()["plan"][0] == "cannot be read"
    assert "Plan settings that differ: not known" in runs.compare("a", "b<i>")._repr_html_()


def test_start_column_is_omitted_if_the_run_name_is_its_start(tmp_path: Path) -> None:
    write_run_folder(tmp_path, "2026-11-22_20-03-09", make_plan(), step_seconds=0.2, loss=5.0, created=1.0)
    runs = ss.runs(tmp_path)
    assert "started" in runs.to_frame() and "started" not in runs._repr_html_()


# ---- curves


def test_loss_curves_are_means_over_ranks(two_runs: Path) -> None:
    first, second = ss.runs(two_runs).compare("a", "b<i>").loss_curves()
    assert first.run == "a" and first.points[0] == 5.5 and first.points[9] == pytest.approx(5.41)
    assert second.run == "b<i>" and list(second.points) == list(range(10))


def test_throughput_curves_have_their_prediction(tmp_path: Path) -> None:
    for name in ("a", "b"):
        predicted = {"step_seconds": 0.5, "from": "calibration"}
        write_run_folder(
            tmp_path, name, make_plan(global_batch_size=32), predicted=predicted, trains_the_plan=name == "a"
        )
        for step in range(5):
            line = {"step": step, "rank": 0, "time": 0.0, "tokens_per_second_all_ranks": 5000.0 + step}
            append_line(RunFolder(tmp_path / name).events(0), line)
    label, (first, second) = ss.runs(tmp_path).compare("a", "b").pace_curves()
    assert label == "tokens/s of all ranks" and first.points[4] == 5004.0
    assert first.predicted == 32 * 64 / 0.5 and second.predicted is None


# ---- tasks and times


def test_run_json_has_task_fields_but_no_strings_of_user_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No supervisor is started, so that a launched run stays in its first status.
    monkeypatch.setattr(this_machine, "start_supervisor", lambda *_: None)

    def launch_and_read_fields(task: Any) -> Any:
        return ss.launch(make_plan(), task, folder=tmp_path).task_fields

    book = tmp_path / "book.txt"
    book.write_text("It was the best of times. " * 20)
    fields = launch_and_read_fields(ss.Pretrain(num_steps=60, seed=3, text=book))
    assert (fields["num_steps"], fields["seed"], fields["learning_rate"]) == (60, 3, 1e-3)
    assert fields["text"] == str(book) and fields["resume"] is None and fields["warmup"] == 0.03
    assert json.loads(json.dumps(fields)) == fields

    @dataclass(frozen=True)
    class UserTask:
        token: str = "hf_abcdefghijklmnopqrstuvwxyz012345"
        num_steps: int = 3
        trains_the_plan: bool = True

        def __call__(self, ctx: Any) -> None: ...

    assert launch_and_read_fields(UserTask()) == {"num_steps": 3, "trains_the_plan": True}
    assert (
        launch_and_read_fields(UserTask(trains_the_plan=False)) is None
        and launch_and_read_fields(lambda ctx: None) is None
    )


def test_comparison_includes_differences_of_task_fields(tmp_path: Path) -> None:
    pretrain = "shardscope.training.tasks.pretrain.Pretrain"
    for name, seed, steps in (("a", 0, 60), ("b", 1, 30)):
        fields = {"num_steps": steps, "seed": seed, "text": None, "save_checkpoint": seed == 1}
        write_run_folder(tmp_path, name, make_plan(), task=pretrain, num_steps=steps, asked=fields)
    finetune = {"num_steps": 30, "weights": "/models/x"}
    write_run_folder(
        tmp_path, "f", make_plan(), task="shardscope.training.tasks.finetune.Finetune", asked=finetune
    )
    write_run_folder(tmp_path, "old", make_plan(recompute="full"), task=pretrain, num_steps=60)
    write_run_folder(
        tmp_path, "moved", make_plan(), task="shardscope.training.pretrain.Pretrain", num_steps=30
    )
    write_run_folder(tmp_path, "mine", make_plan(), task="__main__.train")
    write_run_folder(tmp_path, "yours", make_plan(), task="workshop.train")
    runs = ss.runs(tmp_path)
    pair = runs.compare("a", "b")
    assert pair.plan_differences == []
    assert (
        pair.differences
        == pair.task_differences
        == ["num steps 60 → 30", "seed 0 → 1", "save checkpoint no → yes"]
    )
    html = pair._repr_html_()
    assert "Plan settings that differ: none." in html
    assert "Task settings that differ: num steps 60 → 30; seed 0 → 1; save checkpoint no → yes.<" in html
    assert runs.compare("b", "f").differences == ["task Pretrain → Finetune"]
    assert runs.compare("old", "b").differences == ["recompute full → none", "num steps 60 → 30"]
    assert runs.compare("moved", "b").differences == [], "an earlier version had the class elsewhere"
    assert runs.compare("mine", "yours").differences == ["task __main__.train → workshop.train"]
    same = runs.compare("a", "old")._repr_html_()
    assert "of old only the task" in same, "unknown settings are not reported as equal"


@pytest.fixture
def in_mumbai(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "IST-05:30")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("in_mumbai")
def test_start_is_shown_in_local_time_with_its_utc_offset(two_runs: Path) -> None:
    runs = ss.runs(two_runs)
    assert str(runs.to_frame()["started"][0]) == "2027-01-15 08:00:00+00:00"
    for html in (runs._repr_html_(), runs.compare("a", "b<i>")._repr_html_()):
        assert html.count(">2027-01-15 13:30+05:30</td>") == 2


def test_step_time_curves_replace_throughput_if_tokens_are_unknown(two_runs: Path) -> None:
    description = json.loads((two_runs / "a" / "run.json").read_text())
    write_json(two_runs / "a" / "run.json", {**description, "trains_the_plan": True})
    label, (first, second) = ss.runs(two_runs).compare("a", "b<i>").pace_curves()
    assert label == "step seconds" and first.predicted == 0.3 and second.predicted is None
    assert first.points[9] == 0.2 and second.points[9] == 0.4
