"""``ss.Ray`` and the parts of a launch on Ray that need no Ray."""

from __future__ import annotations

import errno
import json
import os
import pickle
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.requirements import needs

import shardscope as ss
from shardscope.core.errors import FieldError
from shardscope.records.attempts import has_ended, read_attempts
from shardscope.records.folder import NodeFolder, RunFolder
from shardscope.records.json_files import append_line, write_json
from shardscope.runs.backends import kernel_watch, node_process
from shardscope.runs.backends.next_attempt import begin_attempt, conclude_without_lead
from shardscope.runs.backends.nodes import Node, NodePool
from shardscope.runs.backends.peers import Peers
from shardscope.runs.backends.ray import coordinator as ray_coordinator
from shardscope.runs.backends.ray import submission as ray_submission
from shardscope.runs.backends.ray import submission_process
from shardscope.runs.backends.ray import watch as ray_watch
from shardscope.runs.backends.ray.coordinator import Coordinator, describe_node_exit
from shardscope.runs.backends.ray.node import find_interface
from shardscope.runs.backends.ray.submission import build_bundle, check_ray_submission, select_nodes
from shardscope.runs.backends.ray.submission_process import describe_error, describe_node
from shardscope.runs.backends.ray.watch import (
    RayWatch,
    State,
    lost_node_file,
    puller_file,
    received_file,
    state_file,
)
from shardscope.runs.backends.slurm import check_target

HEAD = Node("head", "10.0.0.1", "head", 0, (), 2**35)
GPU_NODE = Node("n1", "10.0.0.2", "n1", 64, (("A100", 8),), 2**39)
POOL = NodePool("the Ray cluster", (HEAD, GPU_NODE, GPU_NODE._replace(name="n2")))
PYTHON = {"prefix": sys.prefix, "executable": sys.executable}


def make_plan(cluster: str) -> ss.Plan:
    recipe = ss.Recipe(seq_len=64, global_batch_size=96)
    return ss.Plan(ss.Architecture.of_size("2m"), ss.Cluster.parse(cluster), recipe, ss.Layout.ddp())


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"address": ""}, "Ray.address"),
        ({"address": "local"}, "Ray.address"),
        ({"address": "10.0.0.1"}, "Ray.address"),
        ({"address": None}, "Ray.address"),
        ({"address": "http://10.0.0.1:8265"}, "Ray.address"),
        ({"node_folder": "scratch"}, "Ray.node_folder"),
        ({"runtime_env": "pip"}, "Ray.runtime_env"),
        ({"runtime_env": {"pips": ["torch"]}}, "Ray.runtime_env"),
        ({"runtime_env": {"pip": {1, 2}}}, "Ray.runtime_env"),
        ({"runtime_env": {"env_vars": {"HF_TOKEN": "hf_" + "aB3" * 12}}}, "Ray.runtime_env"),
    ],
)
def test_a_wrong_field_is_refused(fields: dict[str, object], field: str) -> None:
    with pytest.raises(FieldError) as refused:
        ss.Ray(**fields)  # type: ignore[arg-type]
    assert refused.value.field == field and "aB3aB3" not in str(refused.value)


def test_a_ray_is_a_value() -> None:
    target = ss.Ray(address="ray://head.example:10001", runtime_env={"env_vars": {"A": "1"}})
    assert pickle.loads(pickle.dumps(target)) == target and not target.changes_imports
    assert ss.Ray(runtime_env={"pip": ["shardscope"]}).changes_imports
    assert check_target(target) is target


def test_launch_names_both_targets() -> None:
    for value, fix in (("ray", "ss.Ray()"), (ss.Ray, "ss.Ray()"), ("slurm", "ss.Slurm()"), (3, "None")):
        with pytest.raises(FieldError, match=r"launch\.on") as refused:
            ss.launch(make_plan("2xcpu"), print, on=value)  # type: ignore[arg-type]
        assert fix in str(refused.value)


def test_a_kernel_without_ray_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_submission.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"shardscope\[ray\]"):
        ss.Ray.inventory()


@pytest.mark.parametrize(
    ("address", "completed"),
    [
        ("10.0.0.1", "10.0.0.1:6379"),
        ("http://head.example:8265", "head.example:6379"),
        ("ray://head", "ray://head:10001"),
        ("ray://", "auto"),
        ("local", "auto"),
        ("", "auto"),
    ],
)
def test_an_address_without_a_port_is_completed(address: str, completed: str) -> None:
    with pytest.raises(FieldError) as refused:
        ss.Ray(address=address)
    assert refused.value.changes == {"Ray.address": completed}
    ss.Ray(address=completed)


@pytest.mark.parametrize("field", ["Ray.address", "RAY_ADDRESS"])
def test_an_address_where_nothing_listens_is_refused_at_once(
    field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: object, **__: object) -> None:
        raise AssertionError("Ray itself would wait for minutes")

    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"  # Bound, so that nobody listens there meanwhile.
        monkeypatch.setenv("RAY_ADDRESS", address)
        monkeypatch.setattr(ray_submission.importlib.util, "find_spec", lambda name: name)
        monkeypatch.setattr(ray_submission.subprocess, "Popen", start)
        with pytest.raises(FieldError) as refused:
            ss.Ray.inventory("auto" if field == "RAY_ADDRESS" else address)
    assert refused.value.field == field and "Connection refused" in str(refused.value), str(refused.value)


def test_a_refusal_of_ray_says_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """The nearest fix of a runtime environment that Ray cannot set up was "ss.Ray(...)"."""
    monkeypatch.setattr(ray_submission.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(ray_submission, "_check_head", lambda target: None)
    answer = ["echo", '{"error": "RuntimeEnvSetupError: no virtualenv"}']
    monkeypatch.setattr(ray_submission, "build_module_command", lambda module: answer)
    with pytest.raises(FieldError, match="no virtualenv") as refused:
        ray_submission.RayConnection(ss.Ray(), inspects=True)
    assert "change" in refused.value.fix


@pytest.mark.parametrize(
    ("error", "field", "fix"),
    [
        (TypeError("runtime_env['env_vars'] must be of type Dict[str, str]"), "Ray.runtime_env", "change"),
        (ValueError("directory /nope must be an existing directory"), "Ray.runtime_env", "change"),
        (submission_process.InspectionError("RuntimeEnvSetupError: no"), "Ray.runtime_env", "change"),
        (ValueError("Ray Client requires pip package `ray[client]`."), "Ray.address", "pip install"),
        (ConnectionError("Could not find any running Ray instance"), "Ray.address", "ray start"),
        (ValueError("Invalid Ray address: 'http://head:8265'"), "Ray.address", "ray start"),
        (ValueError("Unable to parse port number (full address = a:b)"), "Ray.address", "ray start"),
    ],
)
def test_a_refusal_of_ray_names_the_field_that_it_is_about(
    error: Exception, field: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong runtime environment was a wrong address, whose fix was the one that `ray start` prints."""
    target = ss.Ray(runtime_env={"working_dir": "/nope"})
    monkeypatch.setattr(ray_submission.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(ray_submission, "_check_head", lambda target: None)
    named = submission_process.find_field(error, {"runtime_env": target.runtime_env})
    answer = json.dumps({"error": submission_process.describe_error(error), "field": named})
    monkeypatch.setattr(ray_submission, "build_module_command", lambda module: ["echo", answer])
    with pytest.raises(FieldError) as refused:
        ray_submission.RayConnection(target, inspects=True)
    assert refused.value.field == field and fix in refused.value.fix
    assert str(error).rstrip(".") in str(refused.value)


def test_the_kernel_does_not_import_ray() -> None:
    code = (
        "import shardscope as ss, sys; ss.Ray(); import shardscope.runs.launch.launch;"
        "print({'ray', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "set()"


def test_nodes_are_read_as_ray_describes_them() -> None:
    node = {
        "NodeManagerAddress": "10.0.0.2",
        "NodeManagerHostname": "n1",
        "Resources": {"CPU": 64.0, "GPU": 8.0, "accelerator_type:A100": 1.0, "memory": 5.0e11},
    }
    expected = {"name": "n1", "address": "10.0.0.2", "host": "n1", "num_cpus": 64, "memory_bytes": 5 * 10**11}
    assert describe_node(node, None) == {**expected, "gpus": [["A100", 8]], "is_idle": None}
    # Ray leaves out a resource of which nothing is left.
    for free, is_idle in (({"CPU": 64.0, "GPU": 8.0}, True), ({"CPU": 64.0, "GPU": 7.0}, False), ({}, False)):
        assert describe_node(node, free)["is_idle"] is is_idle
    assert describe_node({"NodeManagerAddress": "a", "Resources": {}}, None)["gpus"] == []


def test_a_bundle_is_one_nodes_share() -> None:
    # Half of a node's GPUs, and half of its cores. The head, which has none, does not count.
    pool = select_nodes(POOL)
    assert [node.name for node in pool.nodes] == ["n1", "n2"]
    bundle = build_bundle(make_plan("2x4xa100-sxm-80gb"), pool)
    assert bundle == {"GPU": 4.0, "CPU": 32.0, "accelerator_type:A100": ray_submission.GPU_SHARE}
    assert build_bundle(make_plan("2x2xcpu"), pool) == {"CPU": 2.0}


@pytest.mark.parametrize(
    ("cluster", "python", "field", "text"),
    [
        ("3x8xa100-sxm-80gb", {}, "plan.cluster.num_nodes", "2 nodes with 8 A100 GPUs"),
        ("2x8xh100-sxm-80gb", {}, "plan.cluster.gpu", "8 A100 GPUs"),
        ("2x16xa100-sxm-80gb", {}, "plan.cluster.gpus_per_node", "8 A100 GPUs"),
        ("2x8xa100-sxm-80gb", {"shardscope": None}, "launch.on", "has shardscope"),
        ("2x8xa100-sxm-80gb", {"shardscope": "0.0.1"}, "launch.on", "shardscope 0.0.1"),
        ("2x8xa100-sxm-80gb", {"torch": None}, "launch.on", "has torch"),
    ],
)
def test_what_the_cluster_has_not_is_refused(
    cluster: str,
    python: dict[str, str | None],
    field: str,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_submission.importlib.metadata, "version", lambda name: "1.0")
    connection = make_connection({**PYTHON, "shardscope": "1.0", "torch": "1.0", **python})
    with pytest.raises(FieldError) as refused:
        check_ray_submission(connection, make_plan(cluster), force=False)
    assert refused.value.field == field and text in str(refused.value), str(refused.value)


def test_another_torch_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_submission.importlib.metadata, "version", lambda name: "1.0")
    monkeypatch.setattr(ray_submission.platform, "python_version", lambda: "3.11.2")
    python = {**PYTHON, "version": "3.11.2", "shardscope": "1.0", "torch": "0.9"}
    plan = make_plan("2x8xa100-sxm-80gb")
    warning = check_ray_submission(make_connection(python), plan, force=True)
    assert warning == "torch 0.9 on the nodes, 1.0 here"


def make_connection(python: dict[str, object]) -> ray_submission.RayConnection:
    connection = ray_submission.RayConnection.__new__(ray_submission.RayConnection)
    connection.target, connection.pool, connection.python = ss.Ray(), POOL, python
    return connection


def make_run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    for name in ("nodes", "ray"):
        (folder.path / name).mkdir()
    return folder


@pytest.mark.parametrize(
    ("phase", "verdict", "status"),
    [
        ("waiting", "", "queued"),
        ("starting", "", "starting"),
        ("running", "", "starting"),
        ("ended", "stopped", "stopped"),
        ("ended", "failed", "failed"),
        ("ended", "", "failed"),
    ],
)
def test_status_before_a_node_has_started(phase: str, verdict: str, status: str, tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    write_json(state_file(folder), State(phase, "a reason", time.time(), verdict)._asdict())
    assert RayWatch(folder).describe(1.0) == {"status": status, "reason": "a reason"}


def test_a_silent_coordinator_is_lost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    watch = RayWatch(folder)
    assert watch.describe(1.0) is None
    overdue = watch.describe(ray_watch.SUBMIT_PATIENCE_SECONDS + 1)
    assert overdue is not None and overdue["status"] == "lost"
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    write_json(state_file(folder), State("waiting", "for 2 nodes", time.time(), "")._asdict())
    assert watch.describe(1.0) == {"status": "queued", "reason": "for 2 nodes"}
    now[0] += ray_watch.PATIENCE_SECONDS + 1
    lost = watch.describe(1.0)
    assert lost is not None and lost["status"] == "lost" and "for 2 nodes" in str(lost["reason"])
    os.utime(state_file(folder), (1, 1))  # A sign of life: the clocks of two machines may differ.
    assert watch.describe(1.0) == {"status": "queued", "reason": "for 2 nodes"}


def test_a_node_that_ray_has_lost_is_lost_at_once(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    first, second = NodeFolder(folder.path, 0, 2), NodeFolder(folder.path, 1, 2)
    for node in (first, second):
        node.create_own()
        write_json(node.supervisor, {"pid": 1})
    peers, others = Peers(first), Peers(second)
    for lost in (0, 1):
        write_json(lost_node_file(folder, lost), {"reason": "its Ray actor has ended"})
    for watching, node in ((peers, 1), (others, 0)):
        watching.look()
        assert watching.describe_lost() == f"node {node} is lost: its Ray actor has ended"
        assert watching.is_every_end_known()
    # Its ranks had ended before.
    write_json(second.ended, {"status": "finished", "reason": "returned"})
    peers = Peers(first)
    peers.look()
    assert peers.describe_lost() == "" and peers.find_failed() is None


def test_a_lost_node_0_is_a_failure_that_names_it(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    watch = RayWatch(folder)
    assert watch.describe_without_lead() is None
    node = NodeFolder(folder.path, 0, 2)
    node.create_own()
    write_json(node.node_json, {"name": "n1"})
    write_json(lost_node_file(folder, 0), {"reason": "its Ray actor has ended: killed"})
    write_json(state_file(folder), State("running", "", time.time(), "")._asdict())
    ending = watch.describe_without_lead()
    assert ending is not None and ending["status"] == "stopping"
    write_json(state_file(folder), State("ended", "node 0 is lost", time.time(), "failed")._asdict())
    failed = watch.describe_without_lead()
    assert failed is not None and failed["status"] == "failed"
    assert str(failed["reason"]).startswith("node 0 (n1) is lost: its Ray actor has ended: killed")
    assert "it has saved no checkpoint" in str(failed["reason"])


def test_a_run_that_waits_for_its_next_attempt_is_queued(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    lead = NodeFolder(folder.path, 0, 2, 1)
    begin_attempt(lead)
    lead.create_own()
    watch = RayWatch(folder)
    waiting = State("waiting", "attempt 2 follows: node 0 is lost", time.time(), "", "", attempt=2)
    # Node 0 is lost, so it has written no status.
    write_json(state_file(folder), waiting._asdict())
    assert watch.describe_without_lead() == {"status": "queued", "reason": waiting.reason}
    # Node 0 has written that attempt 2 follows, and the other nodes have not ended yet.
    running = State("running", "2 nodes at work", time.time(), "", "", attempt=1)
    write_json(state_file(folder), running._asdict())
    write_json(lead.ended, {"status": "failed", "reason": "rank 1 failed"})
    assert watch.describe(1.0, "attempt 2 follows: rank 1 failed") is None
    begin_attempt(NodeFolder(folder.path, 0, 2, 2))
    assert watch.describe(1.0, "attempt 2 follows: rank 1 failed") == {
        "status": "starting",
        "reason": "2 nodes at work",
    }


@pytest.mark.parametrize(("retries", "follows"), [(2, [True, True, False]), (0, [False])])
def test_attempts_without_node_0_are_counted(retries: int, follows: list[bool], tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    description = {"trains_the_plan": True, "world_size": 1, "retries": retries}
    for attempt, expected in enumerate(follows, 1):
        begin_attempt(folder.select_attempt(attempt))
        part = folder.select_attempt(attempt)
        assert not has_ended(part)
        why_not = conclude_without_lead(part, description, "node 0 (n1) is lost", 0)
        assert (not why_not) == expected and has_ended(part), why_not
    assert {(item["status"], item["node"]) for item in read_attempts(folder)} == {("failed", 0)}


def test_a_run_of_which_nothing_is_received_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    watch = RayWatch(folder)
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    recorded = {"status": "running", "reason": "2 nodes"}
    write_json(puller_file(folder), {"pid": 1})
    assert watch.describe_stream(recorded) is None  # Its nodes share the folder.
    write_json(folder.job, {"folder": "streamed"})
    assert watch.describe_stream(recorded) is None
    now[0] += ray_watch.STREAM_PATIENCE_SECONDS + 1
    outdated = watch.describe_stream(recorded)
    assert outdated is not None and outdated["status"] == "running"
    assert "ss.Run.attach(run.folder)" in str(outdated["reason"])
    write_json(received_file(folder), {"missing": "the cluster has lost it"})
    assert watch.describe_stream(recorded) == {"status": "lost", "reason": "the cluster has lost it"}


def test_errors_of_ray_are_one_line() -> None:
    error = RuntimeError("Traceback (most recent call last):\n  File x\nModuleNotFoundError: No module\n")
    assert describe_error(error) == "RuntimeError: ModuleNotFoundError: No module"
    assert describe_error(FileNotFoundError("/runs is not visible on n1")) == "/runs is not visible on n1"
    assert describe_error(ValueError()) == "ValueError"


def test_loopback_addresses_have_an_interface() -> None:
    assert find_interface("127.0.0.7") == find_interface("127.0.0.1")
    with pytest.raises(OSError, match=r"192\.0\.2\.77"):
        find_interface("192.0.2.77")


def test_a_folder_that_is_not_shared_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    needs("ray")
    monkeypatch.setattr(node_process, "VISIBLE_SECONDS", 0.0)
    with pytest.raises(FileNotFoundError, match="is not visible on"):
        Coordinator(str(tmp_path / "elsewhere"), 2, {"CPU": 1.0}).start()


def test_lines_of_control_stop_a_waiting_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    coordinator = Coordinator(str(folder.path), 2, {"CPU": 1.0})
    append_line(folder.control, {"command": "profile"})
    assert not coordinator._is_stopped()
    append_line(folder.control, {"command": "stop"})
    assert coordinator._is_stopped() and coordinator._stop == "run.stop() was called"


def test_the_end_of_the_kernel_stops_a_waiting_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    full_disk = [OSError(errno.ENOSPC, "No space left on device")]

    def append_once_there_is_space(path: Path, record: dict[str, object]) -> None:
        if full_disk:
            raise full_disk.pop()
        append_line(path, record)

    monkeypatch.setattr(kernel_watch, "append_line", append_once_there_is_space)
    monkeypatch.setattr(kernel_watch, "POLL_SECONDS", 0.01)
    folder = make_run(tmp_path)
    write_json(folder.job, {"scheduler": "ray", "job_id": "shardscope-run-0a1b2c3d", "address": "auto"})
    read_end, write_end = os.pipe()
    os.close(write_end)
    kernel_watch.watch_kernel(folder, read_end)
    os.close(read_end)
    coordinator = Coordinator(str(folder.path), 2, {"CPU": 1.0})
    assert coordinator._is_stopped() and coordinator._stop == "the kernel that launched it ended"


def test_a_waiting_run_without_a_folder_is_stopped(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    coordinator = Coordinator(str(folder.path), 2, {"CPU": 1.0})
    assert not coordinator._is_stopped()
    folder.path.rename(tmp_path / "elsewhere")
    assert coordinator._is_stopped() and coordinator._stop == "the run folder is gone"


def test_a_coordinator_that_fails_masks_its_log_and_gives_its_nodes_back(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = make_run(tmp_path)
    coordinator = Coordinator(str(folder.path), 2, {"CPU": 1.0})
    token = "hf_" + "aB3" * 12
    was_given_back: list[bool] = []

    def fail() -> None:
        raise RuntimeError(f"{token} \udcff é")

    monkeypatch.setattr(coordinator, "_coordinate", fail)
    monkeypatch.setattr(coordinator, "_give_back", lambda: was_given_back.append(True))
    coordinator._run()
    log = (folder.path / "ray" / "coordinator.log").read_bytes()
    assert b"RuntimeError: " + b"*" * len(token) + " \\udcff é".encode() in log
    assert was_given_back and "coordinator failed" in state_file(folder).read_text()
    # Whatever happens to the records of the failure.
    monkeypatch.setattr(ray_coordinator, "redact", lambda text: fail())
    with pytest.raises(RuntimeError):
        coordinator._run()
    assert len(was_given_back) == 2


@pytest.mark.parametrize(
    ("code", "output", "text"),
    [
        (-9, "", "was ended by SIGKILL"),
        (3, "\n", "ended with exit code 3"),
        (1, "no room\n", "ended with exit code 1: no room"),
    ],
)
def test_the_end_of_a_nodes_process_has_no_open_colon(code: int, output: str, text: str) -> None:
    assert describe_node_exit(code, output) == text
