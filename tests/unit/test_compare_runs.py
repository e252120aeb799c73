"""Runs beside each other, from folders as real runs leave them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import shardscope as ss
from shardscope.runs import compare
from shardscope.runs.folder import RunFolder
from shardscope.runs.records import append_line, write_json


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
        write_json(folder.what_it_was(rank), {"memory": memory})
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


def test_a_table_of_runs(two: Path) -> None:
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
    assert ss.runs(two / "a")._repr_html_() == "<p>No runs here.</p>"
    assert [record["status"] for record in found[0].history] == ["starting", "finished"]


def test_two_runs_side_by_side(two: Path) -> None:
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


def test_the_seconds_of_a_run_that_goes_on_are_until_now(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (two / "a" / "status.jsonl").read_text().replace("finished", "running")
    (two / "a" / "status.jsonl").write_text(lines)
    write_json(two / "a" / "supervisor.json", {"pid": 1, "started": 1.0, "machine": "another"})
    monkeypatch.setattr(compare.time, "time", lambda: 1_800_000_100.0)
    assert list(ss.runs(two).to_frame()["seconds"]) == [100.0, 42.0]


def test_a_plan_that_cannot_be_read_is_said(two: Path) -> None:
    description = json.loads((two / "a" / "run.json").read_text())
    write_json(two / "a" / "run.json", {**description, "plan": {"version": -1}})
    found = ss.runs(two)
    assert found.to_frame()["plan"][0] == "cannot be read"
    assert "Differences of their plans: not known" in found.compare("a", "b<i>")._repr_html_()
