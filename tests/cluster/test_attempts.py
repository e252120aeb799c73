"""Runs that Slurm ends and starts again: preemption, time limit, requeue, failures with ``retries``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.cluster.runs import (
    assert_nothing_is_left,
    launch_endless,
    losses,
    make_plan,
    wait_for,
    wait_until_running,
)
from tests.cluster.two_node_slurm import TwoNodeSlurm
from tests.requirements import every_case, needs, skip_without, thorough

import shardscope as ss
from shardscope.records.folder import FINAL
from shardscope.runs.run import Run

needs("accelerate")

STEPS = 20


@dataclass(frozen=True, kw_only=True)
class SlowPretrain(ss.Pretrain):
    """A Pretrain that needs at least ``step_seconds`` for each step."""

    step_seconds: float = 0.1
    fails_at: int | None = None
    """Step at which rank 1 fails, once."""

    def read_text(self, ctx: object) -> object:
        windows = super().read_text(ctx)
        build_batch = windows.build_batch

        def build_slowly(step: int) -> object:
            time.sleep(self.step_seconds)
            if (ctx.rank, step) == (1, self.fails_at) and not (ctx.folder / "failed").exists():
                (ctx.folder / "failed").touch()
                raise ValueError("this rank fails")
            return build_batch(step)

        object.__setattr__(windows, "build_batch", build_slowly)
        return windows


def launch_slow(
    folder: Path,
    target: ss.Slurm,
    num_steps: int = STEPS,
    save_every: int | None = None,
    **options: object,
) -> Run:
    """Launch a run of two nodes and wait until it has trained some steps."""
    task = SlowPretrain(num_steps=num_steps, save_every=save_every)
    run = ss.launch(make_plan("2x1xcpu"), task, folder=folder, name="nodes", on=target, **options)
    wait_for(lambda: len(run.metrics()) > 8 or run.status in FINAL)
    return run


def assert_trained_as_without_interruption(run: Run, expected: list[float]) -> None:
    """Assert that the attempts have logged each step once, with the losses of a run on one machine."""
    assert run.wait(360) == "finished", (run.status, run.reason, run.error, run.attempts)
    for rank in (0, 1):
        steps = [record["step"] for record in run.metrics() if record["rank"] == rank and "loss" in record]
        assert steps == list(range(STEPS))
    assert losses(run) == pytest.approx(expected, abs=1e-5)


@pytest.fixture
def uninterrupted(train_here: Callable[[ss.Layout, int], list[float]]) -> list[float]:
    """Losses of the same task on one machine."""
    return train_here(ss.Layout.ddp(), STEPS)


def list_statuses(run: Run) -> list[str]:
    """Return the statuses that the run had, without repetitions."""
    statuses = [str(record["status"]) for record in run.history]
    return [status for status, before in zip(statuses, [None, *statuses], strict=False) if status != before]


def read_job_id(run: Run) -> str:
    """Return the id of the run's job."""
    return str(json.loads((run.folder / "job.json").read_text())["job_id"])


@thorough()
def test_fault_69_preemption(slurm: TwoNodeSlurm, tmp_path: Path, uninterrupted: list[float]) -> None:
    run = launch_slow(tmp_path, ss.Slurm())
    slurm.submit("urgent", "sleep 3")
    wait_for(lambda: run.status == "queued", 60)
    assert "attempt 2" in run.reason, run.reason
    assert_trained_as_without_interruption(run, uninterrupted)
    first, second = run.attempts
    assert first["status"] == "stopped" and "back into the queue" in str(first["reason"])
    assert second["from_step"] > 0 and second["checkpoint"] and second["status"] == "finished"
    assert len(second["nodes"]) == 2 and first["from_step"] == 0
    expected = ["queued", "starting", "running", "stopping", "queued", "starting", "running", "finished"]
    assert list_statuses(run) == expected
    assert_nothing_is_left(run, slurm)


@thorough()
def test_fault_68_time_limit(slurm: TwoNodeSlurm, tmp_path: Path) -> None:
    # Slurm counts minutes; its signal comes up to a minute before the time that was asked for.
    run = launch_slow(tmp_path, ss.Slurm(time=2, extra={"signal": "USR2@30"}), num_steps=2000)
    # More than one limit may pass on a machine with other work.
    wait_for(lambda: run.attempts[-1]["from_step"] > 0 and run.status == "running", 350)
    assert run.attempts[0]["status"] == "stopped"
    assert "near its time limit" in str(run.attempts[0]["reason"])
    run.stop()
    assert run.wait(60) == "stopped" and run.attempts[-1]["reason"] == "run.stop() was called"
    steps = [record["step"] for record in run.metrics() if record["rank"] == 0]
    assert max(steps) >= run.attempts[-1]["from_step"] - 1 and steps == list(range(len(steps)))
    assert_nothing_is_left(run, slurm)


@thorough()
def test_fault_70_requeue_from_outside_of_a_task_that_saves_nothing(
    slurm: TwoNodeSlurm, tmp_path: Path
) -> None:
    def train_on_first_attempt(ctx: object) -> None:
        import time

        while not (ctx.folder / "leave").exists():
            ctx.log(value=1.0)
            time.sleep(0.1)

    run = ss.launch(make_plan("2x1xcpu"), train_on_first_attempt, folder=tmp_path, on=ss.Slurm(), retries=1)
    wait_for(lambda: {record["rank"] for record in run.metrics()} == {0, 1} or run.status in FINAL)
    slurm.run("scontrol", "requeue", read_job_id(run))
    # It never reads ctx.should_stop, so it is ended before Slurm would kill it.
    wait_for(lambda: len(run.attempts) == 2 and run.status == "running", 120)
    (run.folder / "leave").touch()
    assert run.wait(90) == "finished", (run.status, run.reason, run.error)
    first, second = run.attempts
    assert first["status"] == "stopped" and "did not save" in str(first["reason"])
    assert second["checkpoint"] is None and second["from_step"] == 0
    assert any("starts again at the beginning" in str(record["reason"]) for record in run.history)
    steps = [record["step"] for record in run.metrics() if record["rank"] == 0]
    assert steps == list(range(len(steps)))
    assert_nothing_is_left(run, slurm)


@thorough()
@pytest.mark.parametrize(
    ("layout", "package", "step_seconds"),
    [
        (ss.Layout.ddp(), "torch", 0.1),
        pytest.param(ss.Layout.fsdp2(), "torch", 0.1, marks=every_case()),
        pytest.param(ss.Layout.zero(3), "deepspeed", 0.1, marks=every_case()),
        # Megatron writes checkpoints in the background, for seconds on a busy machine; the rank fails later.
        pytest.param(ss.Layout.megatron(pp=2), "megatron", 1.0, marks=every_case()),
    ],
    ids=lambda value: str(getattr(value, "framework", value)),
)
def test_fault_71_a_failed_rank_is_retried_from_the_checkpoint(
    layout: ss.Layout,
    package: str,
    step_seconds: float,
    slurm: TwoNodeSlurm,
    tmp_path: Path,
    train_here: Callable[[ss.Layout, int], list[float]],
) -> None:
    skip_without(package)
    task = SlowPretrain(num_steps=STEPS, save_every=10, fails_at=18, step_seconds=step_seconds)
    plan = make_plan("2x1xcpu", layout)
    run = ss.launch(plan, task, folder=tmp_path, name="nodes", on=ss.Slurm(), retries=1)
    assert_trained_as_without_interruption(run, train_here(layout, STEPS))
    first, second = run.attempts
    assert (first["status"], first["rank"], first["node"]) == ("failed", 1, 1)
    assert "this rank fails" in str(first["reason"]) and "Traceback" in str(first["error"])
    assert second["from_step"] == 10 and second["status"] == "finished"
    assert_nothing_is_left(run, slurm)


@thorough()
def test_fault_65_71_a_lost_node_is_replaced(
    slurm: TwoNodeSlurm, tmp_path: Path, uninterrupted: list[float]
) -> None:
    run = launch_slow(tmp_path, ss.Slurm(partition="spare"), retries=1, save_every=3)
    names = run.attempts[0]["nodes"]
    lost = json.loads((run.folder / "nodes" / "1" / "node.json").read_text())["name"]
    slurm.kill_node(lost)
    try:
        assert_trained_as_without_interruption(run, uninterrupted)
    finally:
        slurm.start_node(lost)
        slurm.wait_until_idle()
    first, second = run.attempts
    assert first["status"] == "failed" and f"({lost}) is lost" in str(first["reason"]) and lost in names
    assert lost not in second["nodes"] and second["from_step"] >= 3
    assert_nothing_is_left(run, slurm)


@thorough()
def test_fault_66_the_controller_restarts(slurm: TwoNodeSlurm, tmp_path: Path) -> None:
    run = launch_endless(slurm, tmp_path)
    slurm.stop_controller()
    try:
        num_records = len(run.metrics())
        wait_for(lambda: len(run.metrics()) > num_records + 10, 60)
        assert run.status == "running"
    finally:
        slurm.start_controller()
    run.stop(checkpoint=True)
    assert run.wait(60) == "stopped", (run.status, run.reason)
    assert_nothing_is_left(run, slurm)


@thorough()
def test_fault_77_78_the_kernel_is_killed(slurm: TwoNodeSlurm, tmp_path: Path) -> None:
    code = (
        "import shardscope as ss, sys, time; from tests.cluster.runs import make_plan, train_until_stopped;"
        f"ss.launch(make_plan('2x1xcpu'), train_until_stopped, folder={str(tmp_path)!r}, name='run',"
        "on=ss.Slurm(), outlive_kernel=False); print('launched', flush=True); time.sleep(600)"
    )
    # As in an interactive allocation of one task on one node of another partition.
    allocation = {
        "SLURM_NTASKS": "1",
        "SLURM_NNODES": "1",
        "SLURM_JOB_PARTITION": "urgent",
        "SLURM_JOB_QOS": "x",
    }
    environment = {**os.environ, **allocation, "SLURM_RESTART_COUNT": "7"}
    kernel = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment)
    try:
        assert kernel.stdout is not None and kernel.stdout.readline() == b"launched\n"
        run = ss.Run.attach(tmp_path / "run")
        wait_until_running(run)
        assert len(run.attempts) == 1
    finally:
        kernel.kill()
        kernel.wait()
    assert run.wait(60) == "stopped" and run.reason == "the kernel that launched it ended"
    assert_nothing_is_left(run, slurm)


@thorough()
def test_fault_75_a_full_disk_on_one_node(slurm: TwoNodeSlurm, tmp_path: Path) -> None:
    def log_a_lot(ctx: object) -> None:
        import resource

        import torch
        import torch.distributed as dist

        if ctx.rank == 1:  # As with a quota: small records can be written, metrics soon not.
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        for _ in range(200):
            dist.all_reduce(torch.ones(1))
            ctx.log(value=1.0)

    run = ss.launch(make_plan("2x1xcpu"), log_a_lot, folder=tmp_path, on=ss.Slurm())
    assert run.wait(360) == "finished", (run.status, run.reason, run.error)
    counts = [sum(record["rank"] == rank for record in run.metrics()) for rank in (0, 1)]
    assert counts[0] == 200 and 0 < counts[1] < 200
    assert "were not written" in run.logs(1)
    assert_nothing_is_left(run, slurm)
