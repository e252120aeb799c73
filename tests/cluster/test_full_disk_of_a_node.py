"""Nodes without a shared folder, one of which has a full disk: a file system of its own that is too small."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cluster.runs import list_processes, make_plan, wait_for, wait_until_running
from tests.cluster.test_ray_without_shared_folder import find_pullers, notebook, scratch
from tests.cluster.test_two_ray_nodes import bounded, start_ray
from tests.cluster.two_node_ray import ADDRESSES, TwoNodeRay, find_why_not_covered
from tests.requirements import every_case, needs

import shardscope as ss
from shardscope.records.folder import FINAL
from shardscope.runs.run import Run

needs("accelerate")

__all__ = ["bounded", "notebook", "scratch"]
SMALL_DISK = "20m"
"""One checkpoint of a node fits, a second one does not."""


@pytest.fixture(scope="module")
def cluster(notebook: Path, scratch: Path) -> Iterator[TwoNodeRay]:
    why_not = find_why_not_covered()
    if why_not:
        pytest.skip(f"a disk of a node's own needs mount namespaces; run it as root: {why_not}")
    with start_ray(hidden=notebook, scratch=scratch, last_disk=SMALL_DISK) as cluster:
        yield cluster


@pytest.fixture
def target(cluster: TwoNodeRay, scratch: Path, bounded: None) -> Iterator[ss.Ray]:
    yield ss.Ray(address=cluster.address, node_folder=str(scratch))
    assert cluster.wait_until_empty() == []


def find_full_node(run: Run) -> int:
    """Return the number of the node with the small disk, once both have started."""
    files = [run.folder / "nodes" / str(node) / "node.json" for node in (0, 1)]
    wait_for(lambda: all(file.exists() for file in files) or run.status in FINAL)
    addresses = [json.loads(file.read_text())["address"] for file in files]
    return addresses.index(ADDRESSES[-1])


def has_failed_rank(run: Run) -> bool:
    """Return whether a rank's own record says that it has failed."""
    return any("failed" in path.read_text() for path in (run.folder / "ranks").glob("rank-*.json"))


def assert_ended(run: Run, scratch: Path) -> None:
    """Assert that the run ends everywhere within 30 s of the first failure, and says what it should."""
    wait_for(lambda: list((run.folder / "errors").iterdir()) or has_failed_rank(run), 300)
    wait_for(lambda: not list_processes(scratch), 30)
    assert run.wait(60) == "failed", (run.status, run.reason)
    node = find_full_node(run)
    name = json.loads((run.folder / "nodes" / str(node) / "node.json").read_text())["name"]
    assert f"the disk of node {node} ({name}) is full: 0.00 of 0.02 GiB free at " in run.reason, run.reason
    assert f"the disk of node {1 - node}" not in run.reason
    wait_for((run.folder / "received.json").exists, 60)
    wait_for(lambda: not find_pullers(run), 30)
    assert not (run.folder / "task.pkl").exists()


@every_case()
def test_fault_83_a_checkpoint_does_not_fit(
    cluster: TwoNodeRay, target: ss.Ray, notebook: Path, scratch: Path
) -> None:
    task = ss.Pretrain(num_steps=40, save_every=10, keep_last=2)
    run = ss.launch(make_plan("2x1xcpu"), task, folder=notebook, name="saves", on=target)
    wait_for(
        lambda: "step-000020 could not be saved: No space left" in run.reason or run.status in FINAL, 300
    )
    # The ranks keep the last weights until there is space, or a stop.
    wait_for(lambda: "the checkpoint cannot be saved" in run.reason or run.status in FINAL, 300)
    assert run.status == "running", (run.status, run.reason)
    run.stop()
    assert run.wait(60) == "stopped", (run.status, run.reason)
    wait_for((run.folder / "received.json").exists, 60)
    kept = {record["node"]: record["files"] for record in run.files_on_nodes}
    assert all(set(files) == {"checkpoints/step-000010"} for files in kept.values()) and len(kept) == 2, kept
    # What was written of the second one is gone, and the records are complete up to it.
    for number in range(len(ADDRESSES)):
        assert not list(cluster.look_into(number, scratch).glob("*/saves/checkpoints/.*"))
    for rank in (0, 1):
        steps = [r["step"] for r in run.metrics() if r["rank"] == rank and "loss" in r]
        assert steps[:15] == list(range(15)), steps


@every_case()
def test_fault_83_another_program_fills_the_disk(
    cluster: TwoNodeRay, target: ss.Ray, notebook: Path, scratch: Path
) -> None:
    def fail_when_told(ctx: object) -> None:
        import time

        import torch
        import torch.distributed as dist

        while True:
            dist.all_reduce(torch.ones(1))
            ctx.log(value=1.0)
            time.sleep(0.1)
            if ctx.folder.parent.with_name("fail").exists():
                raise ValueError("this rank cannot go on")

    run = ss.launch(make_plan("2x1xcpu"), fail_when_told, folder=notebook, name="filled", on=target)
    wait_until_running(run)
    disk = cluster.look_into(len(ADDRESSES) - 1, scratch)
    (disk / "fail.ready").touch()
    ballast = disk / "ballast"
    try:
        with pytest.raises(OSError, match="No space left"), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        # The disk alone ends nothing: each node still sees that the other one is there.
        until = time.monotonic() + 25
        while time.monotonic() < until:
            assert run.status == "running", (run.status, run.reason)
            time.sleep(0.5)
        healthy = 1 - find_full_node(run)
        num_records = sum(record["rank"] == healthy for record in run.metrics())
        wait_for(lambda: sum(record["rank"] == healthy for record in run.metrics()) > num_records, 30)
        (disk / "fail.ready").rename(disk / "fail")
        assert_ended(run, scratch)
        assert "raised ValueError: this rank cannot go on" in run.reason, run.reason
        assert "no checkpoint was complete" in run.reason
    finally:
        ballast.unlink()
        (disk / "fail").unlink(missing_ok=True)
    assert run.files_on_nodes == []
