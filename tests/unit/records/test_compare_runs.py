"""Runs beside each other, from folders as real runs leave them."""

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
from shardscope.records.files import append_line, write_json
from shardscope.records.folder import RunFolder
from shardscope.runs.explain import compare
from shardscope.runs.launch import launch


def leave_run(
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


def plan_of(**recipe: Any) -> ss.Plan:
    cluster = ss.Cluster.parse("2xcpu")
    return ss.Plan(ss.Architecture.of_size("2m"), cluster, ss.Recipe(seq_len=64, **recipe), ss.Layout.ddp())


@pytest.fixture
def two(tmp_path: Path) -> Path:
    predicted = {"step_seconds": 0.3, "from": "catalogue"}
    leave_run(tmp_path, "a", plan_of(), step_seconds=0.2, loss=5.0, predicted=predicted)
    other = plan_of(recompute="full")
    leave_run(tmp_path, "b<i>", other, step_seconds=0.4, loss=3.0, created=2.0)
    return tmp_path


def test_table_of_runs_has_measurements_and_errors(two: Path) -> None:
    found = ss.runs(two)
    frame = found.to_frame()
    assert list(frame["run"]) == ["a", "b<i>"] and list(frame["status"]) == ["finished", "finished"]
    assert list(frame["seconds"]) == [42.0, 42.0] and list(frame["steps"]) == [10, 10]
    assert list(frame["loss"]) == pytest.approx([5.41, 3.41])
    assert frame["step_error"][0] == pytest.approx(0.5) and frame["step_error"].isna()[1]
    measured = found[0].memory()
    assert frame["tensors_gib"][0] == pytest.approx(measured.tensor_bytes / 2**30)
    assert frame["memory_error"][0] == pytest.approx(measured.error)
    html = found._repr_html_()
    assert "<td>+50%</td>" in html and "<td>–</td>" in html and "b&lt;i&gt;" in html and "<i>" not in html
    assert "<th style='min-width:6.5em'>started</th>" in html
    assert ss.runs(two / "a")._repr_html_() == "<p>No runs here.</p>"
    assert [record["status"] for record in found[0].history] == ["starting", "finished"]


def test_compare_reports_differences_and_curves_of_two_runs(two: Path) -> None:
    found = ss.runs(two)
    pair = found.compare("b<i>", found[0])
    assert pair.differences == ["recompute full → none"]
    assert list(pair.to_frame().columns) == ["b<i>", "a"] and pair.to_frame().loc["ranks", "a"] == 2
    curves = pair.curves()
    assert list(curves.columns) == ["b<i>", "a"] and curves.loc[0, "a"] == 5.5 and len(curves) == 10
    assert "recompute full → none" in pair._repr_html_()
    again = ss.runs(two).compare(ss.Run.attach(two / "a"), "b<i>").runs
    assert [run.name for run in again] == ["a", "b<i>"]
    for stranger in (ss.Run.attach(leave_run(two / "elsewhere", "a", plan_of())), 7):
        with pytest.raises(ValueError, match=r"compare run is .*allowed: one of these: a, b<i>"):
            found.compare(stranger, "a")
    with pytest.raises(ValueError, match=r"compare run is 'c'; allowed: .*b<i>"):
        found.compare("a", "c")
    with pytest.raises(
        ValueError, match=re.escape("curves metric is 'los'; allowed: what was logged: loss, step_")
    ):
        pair.curves("los")


def test_duration_of_a_running_run_lasts_until_now(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (two / "a" / "status.jsonl").read_text().replace("finished", "running")
    (two / "a" / "status.jsonl").write_text(lines)
    write_json(two / "a" / "supervisor.json", {"pid": 1, "started": 1.0, "machine": "another"})
    monkeypatch.setattr(compare.time, "time", lambda: 1_800_000_100.0)
    assert list(ss.runs(two).to_frame()["seconds"]) == [100.0, 42.0]


def test_unreadable_plan_is_reported(two: Path) -> None:
    description = json.loads((two / "a" / "run.json").read_text())
    write_json(two / "a" / "run.json", {**description, "plan": {"version": -1}})
    found = ss.runs(two)
    assert found.to_frame()["plan"][0] == "cannot be read"
    assert "Plan settings that differ: not known" in found.compare("a", "b<i>")._repr_html_()


def test_start_column_is_omitted_if_the_run_name_is_its_start(tmp_path: Path) -> None:
    leave_run(tmp_path, "2026-11-22_20-03-09", plan_of(), step_seconds=0.2, loss=5.0, created=1.0)
    found = ss.runs(tmp_path)
    assert "started" in found.to_frame() and "started" not in found._repr_html_()


# ---- curves


def test_loss_curves_are_means_over_ranks(two: Path) -> None:
    first, second = ss.runs(two).compare("a", "b<i>").loss_curves()
    assert first.run == "a" and first.points[0] == 5.5 and first.points[9] == pytest.approx(5.41)
    assert second.run == "b<i>" and list(second.points) == list(range(10))


def test_throughput_curves_have_their_prediction(tmp_path: Path) -> None:
    for name in ("a", "b"):
        predicted = {"step_seconds": 0.5, "from": "calibration"}
        leave_run(
            tmp_path, name, plan_of(global_batch_size=32), predicted=predicted, trains_the_plan=name == "a"
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
    # No supervisor comes up: what is launched stays at its beginning.
    monkeypatch.setattr(launch, "_start_supervisor", lambda *_: None)

    def asked(task: Any) -> Any:
        return ss.launch(plan_of(), task, folder=tmp_path).task_fields

    book = tmp_path / "book.txt"
    book.write_text("It was")
    kept = asked(ss.Pretrain(num_steps=60, seed=3, text=book))
    assert (kept["num_steps"], kept["seed"], kept["learning_rate"]) == (60, 3, 1e-3)
    assert kept["text"] == str(book) and kept["resume"] is False and kept["warmup_steps"] is None
    assert json.loads(json.dumps(kept)) == kept

    @dataclass(frozen=True)
    class Theirs:
        token: str = "hf_abcdefghijklmnopqrstuvwxyz012345"
        num_steps: int = 3
        trains_the_plan: bool = True

        def __call__(self, ctx: Any) -> None: ...

    assert asked(Theirs()) == {"num_steps": 3, "trains_the_plan": True}
    assert asked(Theirs(trains_the_plan=False)) is None and asked(lambda ctx: None) is None


def test_comparison_includes_differences_of_task_fields(tmp_path: Path) -> None:
    pretrain = "shardscope.training.tasks.pretrain.Pretrain"
    for name, seed, steps in (("a", 0, 60), ("b", 1, 30)):
        fields = {"num_steps": steps, "seed": seed, "text": None, "save_checkpoint": seed == 1}
        leave_run(tmp_path, name, plan_of(), task=pretrain, num_steps=steps, asked=fields)
    finetune = {"num_steps": 30, "weights": "/models/x"}
    leave_run(tmp_path, "f", plan_of(), task="shardscope.training.tasks.finetune.Finetune", asked=finetune)
    leave_run(tmp_path, "old", plan_of(recompute="full"), task=pretrain, num_steps=60)
    leave_run(tmp_path, "moved", plan_of(), task="shardscope.training.pretrain.Pretrain", num_steps=30)
    leave_run(tmp_path, "mine", plan_of(), task="__main__.train")
    leave_run(tmp_path, "yours", plan_of(), task="workshop.train")
    found = ss.runs(tmp_path)
    pair = found.compare("a", "b")
    assert pair.plan_differences == []
    assert (
        pair.differences
        == pair.task_differences
        == ["num steps 60 → 30", "seed 0 → 1", "save checkpoint no → yes"]
    )
    html = pair._repr_html_()
    assert "Plan settings that differ: none." in html
    assert "Task settings that differ: num steps 60 → 30; seed 0 → 1; save checkpoint no → yes.<" in html
    assert found.compare("b", "f").differences == ["task Pretrain → Finetune"]
    assert found.compare("old", "b").differences == ["recompute full → none", "num steps 60 → 30"]
    assert found.compare("moved", "b").differences == [], "an earlier version had the class elsewhere"
    assert found.compare("mine", "yours").differences == ["task __main__.train → workshop.train"]
    same = found.compare("a", "old")._repr_html_()
    assert "of old only the task" in same, "what is not known is not called equal"


@pytest.fixture
def in_mumbai(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "IST-05:30")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("in_mumbai")
def test_start_is_shown_in_local_time_with_its_utc_offset(two: Path) -> None:
    found = ss.runs(two)
    assert str(found.to_frame()["started"][0]) == "2027-01-15 08:00:00+00:00"
    for html in (found._repr_html_(), found.compare("a", "b<i>")._repr_html_()):
        assert html.count(">2027-01-15 13:30+05:30</td>") == 2


def test_step_time_curves_replace_throughput_if_tokens_are_unknown(two: Path) -> None:
    description = json.loads((two / "a" / "run.json").read_text())
    write_json(two / "a" / "run.json", {**description, "trains_the_plan": True})
    label, (first, second) = ss.runs(two).compare("a", "b<i>").pace_curves()
    assert label == "step seconds" and first.predicted == 0.3 and second.predicted is None
    assert first.points[9] == 0.2 and second.points[9] == 0.4
