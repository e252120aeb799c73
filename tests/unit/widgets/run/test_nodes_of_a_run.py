"""Tests of the views of a Slurm run: its job, nodes' names, slowest node and logs, attempts, and Cancel."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from fake_runs import wait_until
from written_runs import PLAN, make_metrics, write_run

import shardscope as ss
from shardscope.records.attempts import write_beginning, write_end
from shardscope.records.folder import NodeFolder, RunFolder
from shardscope.records.json_files import append_line, write_json
from shardscope.records.nodes import describe_job, read_nodes
from shardscope.runs.backends import job_watch
from shardscope.runs.backends.slurm_job import Job
from shardscope.runs.watch.pace import Pace
from shardscope_widgets import RunView
from shardscope_widgets.run.run_html import render_attempts
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
    assert wait_until(lambda: "slowest of 2 nodes: steps +25 %" in view.facts.value)
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
    assert wait_until(lambda: view.stop_button.description == "Cancel" and not view.stop_button.disabled)
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


def begin_second_attempt(path: Path, *, names: tuple[str, ...]) -> None:
    """Write the end of a first attempt that Slurm preempted, and the beginning of a second on other nodes."""
    first, second = RunFolder(path, 1), RunFolder(path, 2)
    write_beginning(first, checkpoint=None, from_step=0, control_bytes=0)
    write_end(first, "stopped", "Slurm preempts job <4711>")
    checkpoint = path / "checkpoints" / "step-000120"
    write_beginning(second, checkpoint=checkpoint, from_step=120, control_bytes=0)
    for number, node_name in enumerate(names):
        node = NodeFolder(path, number, 2, 2)
        node.create_own()
        write_json(node.node_json, {"name": node_name}, as_is=("name",))
        node.supervisor_log.write_text(f"supervisor of {node_name}\n")
        write_json(node.supervisor, {"pid": 1, "started": 1.0, "machine": "other"})


def test_nodes_are_those_of_the_latest_attempt(tmp_path: Path) -> None:
    path = write_slurm_run("again", tmp_path, names=("gpu01", "gpu02"))
    run = ss.Run.attach(path)
    first = run.nodes
    begin_second_attempt(path, names=("gpu07",))
    # The second node has not started yet: it is not that of the first attempt.
    assert [node.name for node in run.nodes] == ["gpu07", "node 1"]
    assert run.nodes[0].folder.supervisor_log.read_text() == "supervisor of gpu07\n"
    # A list that was read before does not change its files.
    assert first[0].folder.supervisor_log.read_text() == "supervisor of gpu01\n"
    assert [node.name for node in read_nodes(RunFolder(path, 1), 2, 4)] == ["gpu01", "gpu02"]


def test_an_open_view_goes_on_with_the_next_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_slurm_run("again", tmp_path, names=("gpu01", "gpu02"), status="running")
    job = Job(state="RUNNING", reason="", start="", nodes="gpu[01-02]", preempted=False)
    monkeypatch.setattr(job_watch, "read_job", lambda job_id: job)
    view = RunView(ss.Run.attach(path))
    assert wait_until(lambda: "supervisor · gpu02" in dict(view.logs.whose.options))
    view.logs.whose.value = dict(view.logs.whose.options)["supervisor · gpu02"]
    assert wait_until(lambda: "supervisor of gpu02" in view.logs.pane.value)
    key = view.logs.pane.key
    assert "attempt" not in view.head.value, "a run of one attempt has no line about it"
    begin_second_attempt(path, names=("gpu07", "gpu08"))
    assert wait_until(lambda: "supervisor of gpu08" in view.logs.pane.value)
    assert view.logs.pane.key != key, "the page would keep the scroll position of the other log"
    assert "rank 3 · gpu08" in dict(view.logs.whose.options)
    line = "attempt 2 resumed from step 120; attempt 1 stopped: Slurm preempts job &lt;4711&gt;</div>"
    assert wait_until(lambda: line in view.head.value), view.head.value
    append_line(RunFolder(path).status, {"time": 2.0, "status": "stopped", "reason": "by the test"})
    assert wait_until(lambda: view.status == "stopped")
    view.close()


def test_the_line_about_attempts_is_plain_english() -> None:
    began = {"began": 1.0, "from_step": 0, "checkpoint": None, "status": None, "reason": None}
    failed = {**began, "attempt": 1, "status": "failed", "reason": "rank 1 raised\nValueError"}
    lost = {**began, "attempt": 2, "status": "lost", "reason": ""}
    assert render_attempts([failed]) == ""
    html = render_attempts([failed, {**began, "attempt": 2}])
    assert "attempt 2 started at the beginning; attempt 1 failed: rank 1 raised ValueError</div>" in html
    html = render_attempts([failed, lost, {**began, "attempt": 3, "began": None}])
    assert html.endswith("attempt 3 is starting; attempt 2 was lost</div>")
    assert "attempt 1 failed" in html.partition(">")[0], "the tooltip has the attempts before, too"
    many = [{**failed, "attempt": number, "reason": "x" * 10**5} for number in range(1, 1000)]
    assert len(render_attempts(many)) < 5000, "anybody may have written the folder"
