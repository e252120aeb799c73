"""Runs on Ray that are started again after a failure, with ``retries``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cluster.runs import list_processes, make_plan, wait_for
from tests.cluster.test_attempts import (
    STEPS,
    SlowPretrain,
    assert_trained_as_without_interruption,
    launch_slow,
    list_statuses,
    uninterrupted,
)
from tests.cluster.test_two_ray_nodes import assert_nothing_is_left, bounded, cluster, ray, start_ray
from tests.cluster.two_node_ray import TwoNodeRay
from tests.requirements import every_case, needs, thorough

import shardscope as ss
from shardscope.runs.run import Run

needs("accelerate")

__all__ = ["bounded", "cluster", "ray", "uninterrupted"]
SPARE_ADDRESS = "127.0.0.4"


def read_node(run: Run, node: int) -> dict[str, object]:
    """Return the record of a node of the first attempt."""
    record: dict[str, object] = json.loads((run.folder / "nodes" / str(node) / "node.json").read_text())
    return record


@thorough()
def test_fault_71_a_failed_rank_is_retried_from_the_checkpoint(
    ray: TwoNodeRay, tmp_path: Path, uninterrupted: list[float]
) -> None:
    task = SlowPretrain(num_steps=STEPS, save_every=10, fails_at=15)
    target = ss.Ray(address=ray.address)
    run = ss.launch(make_plan("2x1xcpu"), task, folder=tmp_path, name="nodes", on=target, retries=1)
    assert_trained_as_without_interruption(run, uninterrupted)
    first, second = run.attempts
    assert (first["status"], first["rank"], first["node"]) == ("failed", 1, 1)
    assert "this rank fails" in str(first["reason"]) and "Traceback" in str(first["error"])
    assert second["from_step"] == 10 and second["status"] == "finished" and len(second["nodes"]) == 2
    expected = ["queued", "starting", "running", "queued", "starting", "running", "finished"]
    assert list_statuses(run) == expected
    assert_nothing_is_left(run, ray)


@every_case()
@pytest.mark.parametrize("lost", [0, 1])
def test_fault_71_86_a_killed_actor_is_replaced(
    lost: int, ray: TwoNodeRay, tmp_path: Path, uninterrupted: list[float]
) -> None:
    run = launch_slow(tmp_path, ss.Ray(address=ray.address), retries=1, save_every=3)
    record = read_node(run, lost)
    (actor,) = [process for process in ray.find_actors("NodeActor") if process.pid == record["actor_pid"]]
    actor.kill()
    assert_trained_as_without_interruption(run, uninterrupted)
    first, second = run.attempts
    assert first["status"] == "failed" and "its Ray actor has ended" in str(first["reason"])
    assert f"node {lost} ({record['name']}) is lost" in str(first["reason"])
    assert second["from_step"] >= 3 and second["status"] == "finished"
    assert_nothing_is_left(run, ray)


@thorough()
def test_fault_65_71_a_dead_node_is_replaced_by_another(
    bounded: None, tmp_path: Path, uninterrupted: list[float]
) -> None:
    with start_ray() as ray:
        run = launch_slow(tmp_path, ss.Ray(address=ray.address), retries=1, save_every=3)
        # The first bundle is on either node; the head is the one that lives on.
        addresses = {node: read_node(run, node)["address"] for node in (0, 1)}
        lost = next(node for node, address in addresses.items() if address == "127.0.0.3")
        ray.kill_node(1)
        wait_for(lambda: run.status == "queued" and "placement group waits" in run.reason, 120)
        assert "attempt 2 follows" in run.reason and f"node {lost}" in run.reason, run.reason
        assert not list_processes(run.folder)
        ray.add_node(SPARE_ADDRESS)
        assert_trained_as_without_interruption(run, uninterrupted)
        first, second = run.attempts
        assert first["status"] == "failed" and f"node {lost}" in str(first["reason"])
        assert second["from_step"] >= 3
        records = (run.folder / "attempts" / "2" / "nodes").glob("*/node.json")
        assert {json.loads(path.read_text())["address"] for path in records} == {"127.0.0.2", SPARE_ADDRESS}
        assert ray.wait_until_empty() == []


@every_case()
def test_a_run_that_waits_for_its_next_attempt_is_stopped(bounded: None, tmp_path: Path) -> None:
    with start_ray() as ray:
        run = launch_slow(tmp_path, ss.Ray(address=ray.address), retries=1)
        ray.kill_node(1)
        wait_for(lambda: run.status == "queued" and "placement group waits" in run.reason, 120)
        ss.Run.attach(run.folder).stop()
        assert run.wait(60) == "stopped", (run.status, run.reason)
        assert run.reason == "run.stop() was called before attempt 2 started"
        wait_for(lambda: not (run.folder / "task.pkl").exists(), 30)
