"""``ss.launch(on=ss.Ray())`` on a real Ray of two nodes: CPU ranks train as on one machine."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.conftest import SECONDS_PER_TEST
from tests.cluster.runs import wait_until_running
from tests.cluster.test_two_nodes import (
    FRAMEWORKS,
    STEPS,
    list_processes,
    losses,
    make_plan,
    train_until_stopped,
    wait_for,
)
from tests.cluster.two_node_ray import TwoNodeRay
from tests.requirements import every_case, skip_without, thorough

import shardscope as ss
from shardscope.core.errors import FieldError
from shardscope.records.folder import FINAL
from shardscope.runs.launch import launch as launch_module
from shardscope.runs.run import Run


@contextlib.contextmanager
def start_ray(**folders: Any) -> Iterator[TwoNodeRay]:
    """Start a cluster that leaves no process."""
    for package in ("ray", "torch"):
        skip_without(package)
    cluster = TwoNodeRay(**folders)
    try:
        cluster.start()
        yield cluster
    finally:
        left = cluster.stop()
    assert left == []


@pytest.fixture(scope="module")
def cluster() -> Iterator[TwoNodeRay]:
    with start_ray() as cluster:
        yield cluster


@pytest.fixture
def bounded() -> Iterator[None]:
    """Bound the time of one test."""

    def too_long(*_: object) -> None:
        raise TimeoutError(f"the test took more than {SECONDS_PER_TEST} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(SECONDS_PER_TEST)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def ray(cluster: TwoNodeRay, bounded: None) -> Iterator[TwoNodeRay]:
    """The cluster, for one test after which nothing is left on it."""
    yield cluster
    assert cluster.wait_until_empty() == []


def launch_endless(ray: TwoNodeRay, folder: Path) -> Run:
    """Launch a run that both nodes have begun."""
    run = ss.launch(make_plan("2x1xcpu"), train_until_stopped, folder=folder, on=ss.Ray(address=ray.address))
    wait_until_running(run)
    return run


def assert_nothing_is_left(run: Run, ray: TwoNodeRay) -> None:
    wait_for(lambda: not list_processes(run.folder), 30)
    assert ray.wait_until_empty() == []
    assert not (run.folder / "task.pkl").exists()
    for folder in (run.folder, run.folder / "ray", run.folder / "nodes"):
        assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "name", ["ddp", *(pytest.param(name, marks=every_case()) for name in FRAMEWORKS if name != "ddp")]
)
def test_two_ray_nodes_train_as_one_machine(
    name: str, ray: TwoNodeRay, tmp_path: Path, train_here: Callable[[ss.Layout, int], list[float]]
) -> None:
    make_layout, package = FRAMEWORKS[name]
    skip_without(package)
    task = ss.Pretrain(num_steps=STEPS)
    target = ss.Ray(address=ray.address)
    run = ss.launch(make_plan("2x1xcpu", make_layout()), task, folder=tmp_path, name="nodes", on=target)
    assert run.status in ("queued", "starting")
    run.wait(360)
    across = losses(run)
    records = [json.loads((run.folder / "nodes" / node / "node.json").read_text()) for node in "01"]
    assert len({record["ray_node_id"] for record in records}) == 2
    assert across == pytest.approx(train_here(make_layout(), STEPS), abs=1e-5) and len(across) == STEPS
    assert_nothing_is_left(run, ray)


@every_case()
def test_stop_of_a_run_and_of_one_that_waits_for_its_nodes(ray: TwoNodeRay, tmp_path: Path) -> None:
    run = launch_endless(ray, tmp_path)
    waiting = ss.launch(
        make_plan("2x1xcpu"), train_until_stopped, folder=tmp_path, on=ss.Ray(address=ray.address)
    )
    wait_for(lambda: "2 nodes with 1 CPU free requested" in waiting.reason or waiting.status in FINAL, 60)
    assert waiting.status == "queued" and "0 CPU free" in waiting.reason, (waiting.status, waiting.reason)
    ss.Run.attach(waiting.folder).stop()
    assert waiting.wait(60) == "stopped", (waiting.status, waiting.reason)
    assert waiting.reason == "run.stop() was called before any rank started"
    run.stop()
    assert run.wait(60) == "stopped" and run.reason == "run.stop() was called"
    assert_nothing_is_left(run, ray)


@thorough()
def test_stop_with_checkpoint_after_the_kernel_was_killed(ray: TwoNodeRay, tmp_path: Path) -> None:
    code = (
        "import os, signal, shardscope as ss\n"
        "from tests.cluster.test_two_nodes import make_plan, train_until_stopped\n"
        f"ss.launch(make_plan('2x1xcpu'), train_until_stopped, folder={str(tmp_path)!r}, name='run',"
        f" on=ss.Ray(address={ray.address!r}))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=240)
    assert done.returncode == -signal.SIGKILL
    run = ss.Run.attach(tmp_path / "run")
    wait_until_running(run)
    run.stop(checkpoint=True)
    assert run.wait(60) == "stopped", (run.status, run.reason)
    # Both ranks left after the same step, and saved.
    assert [(run.folder / f"saved-{rank}").read_text() for rank in (0, 1)] == ["saved", "saved"]
    steps = [
        max(int(record["step"]) for record in run.metrics() if record["rank"] == rank) for rank in (0, 1)
    ]
    assert steps[0] == steps[1]
    assert_nothing_is_left(run, ray)


@every_case()
def test_fault_78_the_kernel_is_killed(ray: TwoNodeRay, tmp_path: Path) -> None:
    code = (
        "import shardscope as ss, time\n"
        "from tests.cluster.test_two_nodes import make_plan, train_until_stopped\n"
        "for name in ('run', 'waiting'):\n"
        f"    ss.launch(make_plan('2x1xcpu'), train_until_stopped, folder={str(tmp_path)!r}, name=name,"
        f" on=ss.Ray(address={ray.address!r}), outlive_kernel=False)\n"
        "print('launched', flush=True); time.sleep(600)"
    )
    kernel = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert kernel.stdout is not None and kernel.stdout.readline() == b"launched\n"
        run, waiting = (ss.Run.attach(tmp_path / name) for name in ("run", "waiting"))
        wait_for(lambda: {record["rank"] for record in run.metrics()} == {0, 1} or run.status in FINAL)
        wait_for(lambda: "requested" in waiting.reason or waiting.status in FINAL, 60)
        assert (run.status, waiting.status) == ("running", "queued"), (run.reason, waiting.reason)
    finally:
        kernel.kill()
        kernel.wait()
    assert run.wait(60) == "stopped" and run.reason == "the kernel that launched it ended"
    assert waiting.wait(60) == "stopped", (waiting.status, waiting.reason)
    # The end of the first run may have given the second one its nodes before it read the request.
    assert waiting.reason.startswith("the kernel that launched it ended"), waiting.reason
    assert_nothing_is_left(run, ray)
    wait_for(lambda: not list_processes(waiting.folder), 30)


@thorough()
@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=every_case())])
def test_fault_86_killed_actor(lost: int, ray: TwoNodeRay, tmp_path: Path) -> None:
    run = launch_endless(ray, tmp_path)
    record = json.loads((run.folder / "nodes" / str(lost) / "node.json").read_text())
    (actor,) = [process for process in ray.find_actors("NodeActor") if process.pid == record["actor_pid"]]
    began = time.monotonic()
    actor.kill()
    wait_for(lambda: not list_processes(run.folder), 60)
    print(f"all ranks ended after {time.monotonic() - began:.0f} s")
    status = run.wait(60)
    # Node 0 writes the status, if it is there.
    assert status == "failed", (status, run.reason)
    assert "its Ray actor has ended" in run.reason, run.reason
    assert f"node {lost} ({record['name']}) is lost" in run.reason, run.reason
    assert "launch again" in run.reason or lost, run.reason
    assert ray.wait_until_empty() == []


@thorough()
def test_fault_84_killed_coordinator(ray: TwoNodeRay, tmp_path: Path) -> None:
    run = launch_endless(ray, tmp_path)
    (coordinator,) = ray.find_actors("Coordinator")
    coordinator.kill()
    # Ray kills the actors of an owner that is gone, and the operating system what they have started.
    wait_for(lambda: not list_processes(run.folder), 60)
    assert run.wait(60) in ("lost", "failed"), (run.status, run.reason)
    assert ray.wait_until_empty() == []


@thorough()
@pytest.mark.parametrize("only_gcs", [True, pytest.param(False, marks=every_case())])
def test_fault_84_killed_head(only_gcs: bool, bounded: None, tmp_path: Path) -> None:
    with start_ray() as ray:
        run = launch_endless(ray, tmp_path)
        began = time.monotonic()
        ray.kill_head(only_gcs=only_gcs)
        wait_for(lambda: not list_processes(run.folder), 60)
        print(f"all ranks ended after {time.monotonic() - began:.0f} s")
        status = run.wait(60)
        assert status in ("lost", "failed", "stopped"), (status, run.reason)
        if only_gcs:
            assert "Ray's head has not answered" in run.reason, (status, run.reason)


def check_failed_launch(
    target: ss.Ray, parent: Path, cluster: TwoNodeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launch a run whose handle cannot be created, after the cluster has begun it: nothing is left."""

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(launch_module, "Run", fail)
    with pytest.raises(MemoryError):
        ss.launch(make_plan("2x1xcpu"), train_until_stopped, folder=parent / "runs", on=target)
    assert not (parent / "runs").exists()
    assert cluster.wait_until_empty() == []
    wait_for(lambda: not list_processes(parent / "runs"), 30)


def test_fault_61_a_launch_that_raises_after_ray_has_begun_the_run(
    ray: TwoNodeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_failed_launch(ss.Ray(address=ray.address), tmp_path, ray, monkeypatch)


def test_what_the_ray_cluster_has_not_is_refused(ray: TwoNodeRay, tmp_path: Path) -> None:
    target = ss.Ray(address=ray.address)
    cluster = ss.Ray.inventory(ray.address, only_idle=True)
    assert (cluster.num_nodes, cluster.gpu.name, cluster.gpus_per_node) == (2, "cpu", 1)
    cases = [
        (make_plan("3x1xcpu", batch=3), target, "plan.cluster.num_nodes", "2 nodes"),
        (make_plan("2x1xa100-sxm-80gb"), target, "plan.cluster.gpu", "no GPUs"),
    ]
    for plan, on, field, text in cases:
        with pytest.raises(FieldError) as refused:
            ss.launch(plan, train_until_stopped, folder=tmp_path / "none", on=on)
        assert refused.value.field == field and text in str(refused.value), str(refused.value)
    assert not (tmp_path / "none").exists() and ray.list_left() == []
