"""Tests of the views of a Slurm run: its job, its nodes' names, slowest node and logs, and Cancel."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from fake_runs import wait_until
from written_runs import PLAN, make_metrics, write_run

import shardscope as ss
from shardscope.records.folder import NodeFolder, RunFolder
from shardscope.records.json_files import append_line, write_json
from shardscope.records.nodes import describe_job, read_nodes
from shardscope.runs.backends import job_watch
from shardscope.runs.backends.slurm_job import Job
from shardscope.runs.watch.pace import Pace
from shardscope_widgets import RunView
from shardscope_widgets.run.runs_view import RunsView

TWO_NODES = replace(
    PLAN, cluster=ss.Cluster.parse("2x2xcpu"), recipe=replace(PLAN.recipe, global_batch_size=4)
)


def write_slurm_run(name: str, parent: Path, *, names: tuple[str, ...], status: str = "finished") -> Path:
    """Write the folder of a run on two nodes of two ranks, of which those in ``names`` have started."""
    path = write_run(name, status, parent=parent, plan=TWO_NODES, num_done=20 if names else 0)
    folder = RunFolder(path)
    description = json.loads(folder.run_json.read_text())
    write_json(folder.run_json, {**description, "num_nodes": 2, "machine": "", "scheduler": "slurm"})
    write_json(folder.job, {"scheduler": "slurm", "job_id": "4711", "partition": "a100"})
    (path / "nodes").mkdir()
    for number, node_name in enumerate(names):
        node = NodeFolder(path, number, 2)
        node.create_own()
        write_json(node.node_json, {"name": node_name}, as_is=("name",))
        node.supervisor_log.write_text(f"supervisor of {node_name}\n")
        write_json(node.supervisor, {"pid": 1, "started": 1.0, "machine": "other"})
    folder.supervisor.unlink()
    return path


def test_a_run_names_its_job_and_nodes(tmp_path: Path) -> None:
    run = ss.Run.attach(write_slurm_run("one", tmp_path, names=("gpu01", "gpu02")))
    assert run.target == "Slurm: a100, job 4711"
    assert [(node.name, list(node.ranks)) for node in run.nodes] == [("gpu01", [0, 1]), ("gpu02", [2, 3])]
    write_run("two", parent=tmp_path)
    runs = ss.runs(tmp_path)
    frame = runs.to_frame().set_index("run")
    assert frame.loc["one", "target"] == run.target and frame.loc["one", "nodes"] == 2
    assert frame.loc["two", "target"] == "" and frame.loc["two", "nodes"] == 1
    assert "job 4711" in runs._repr_html_()
    here = ss.runs(tmp_path)
    here.remove(next(one for one in here if one.name == "one"))
    assert "<th>target" not in here._repr_html_(), "runs of one machine have no column for it"


def test_hostile_names_are_text_of_one_short_line(tmp_path: Path) -> None:
    folder = RunFolder(write_slurm_run("bad", tmp_path, names=("\x1b[31mred\nline" + "x" * 500, "n2")))
    write_json(folder.job, {"scheduler": ["x"], "job_id": 3, "partition": "a\x1b]0;t\x07\nb"})
    names = [node.name for node in read_nodes(folder, 2, 4)]
    assert names[0].startswith("red line") and len(names[0]) == 64
    assert "\x1b" not in describe_job(folder) and "\n" not in describe_job(folder)
    for num_nodes in (None, True, -1, 10**9, "2"):
        assert read_nodes(folder, num_nodes, 4) == []


def test_table_and_logs_name_the_node(tmp_path: Path) -> None:
    view = RunView(ss.Run.attach(write_slurm_run("one", tmp_path, names=("gpu<1>", "gpu02"))))
    assert wait_until(lambda: "rank 3 <span class='ss-hint'>gpu02</span>" in view.table.value)
    assert "rank 0 <span class='ss-hint'>gpu&lt;1&gt;</span>" in view.table.value
    assert "Slurm: a100, job 4711" in view.head.value
    labels = dict(view.logs.whose.options)
    assert labels["rank 2 · gpu02"] == 2
    view.logs.whose.value = labels["supervisor · gpu02"]
    assert wait_until(lambda: "supervisor of gpu02" in view.logs.pane.value)
    view.logs.whose.value = labels["supervisor · gpu<1>"]
    assert wait_until(lambda: "supervisor of gpu&lt;1&gt;" in view.logs.pane.value)
    view.close()


def test_slowest_node_is_named(tmp_path: Path) -> None:
    path = write_slurm_run("one", tmp_path, names=("gpu01", "gpu02"))
    for rank in range(4):
        for step in range(20, 45):
            record = {**make_metrics(step, rank, 0.0), "step_seconds": 0.5 if rank >= 2 else 0.4}
            append_line(RunFolder(path).events(rank), record)
    view = RunView(ss.Run.attach(path))
    assert wait_until(lambda: "slowest of 2 nodes, by 25 %" in view.facts.value)
    assert "gpu02" in view.facts.value and "rank 2 on gpu02" in view.facts.value
    view.close()
    assert Pace().find_slowest_node({0: 0, 1: 1}) is None


def test_a_waiting_job_is_cancelled_and_gets_its_names_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_slurm_run("waits", tmp_path / "runs", names=(), status="queued")
    job = Job(state="PENDING", reason="Resources", start="2026-11-27T14:05:00", nodes="", preempted=False)
    monkeypatch.setattr(job_watch, "read_job", lambda job_id: job)
    run = ss.Run.attach(path)
    view, runs = RunView(run), RunsView()
    assert wait_until(lambda: "waits: Resources; estimated start 2026-11-27 14:05:00" in view.head.value)
    assert view.stop_button.description == "Cancel" and not view.stop_button.disabled
    assert "ss-off" in view.save_button._dom_classes, "nothing has been computed yet"
    runs.read_folder()
    assert ">Cancel</button>" in runs.table.value and "job 4711" in runs.table.value
    assert "rank 0 · node 0" in dict(view.logs.whose.options)
    for number in range(2):
        node = NodeFolder(path, number, 2)
        node.create_own()
        write_json(node.node_json, {"name": f"gpu0{number}"}, as_is=("name",))
        write_json(node.supervisor, {"pid": 1, "started": 1.0, "machine": "other"})
    append_line(RunFolder(path).status, {"time": 1.0, "status": "running", "reason": ""})
    assert wait_until(lambda: "rank 3 · gpu01" in dict(view.logs.whose.options))
    assert wait_until(lambda: view.stop_button.description == "Stop")
    append_line(RunFolder(path).status, {"time": 2.0, "status": "stopped", "reason": "by the test"})
    assert wait_until(lambda: view.status == "stopped")
    for widget in (view, runs):
        widget.close()
