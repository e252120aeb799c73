"""What the tests of this folder share: a small plan, an endless task, and what must be left of a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import psutil
from tests.cluster.two_node_slurm import TwoNodeSlurm

import shardscope as ss
from shardscope.records.folder import FINAL
from shardscope.runs.run import Run


def make_plan(cluster: str, layout: object = None, batch: int = 4) -> ss.Plan:
    recipe = ss.Recipe(seq_len=64, micro_batch_size=1, global_batch_size=batch, precision="fp32")
    return ss.Plan(
        ss.Architecture.of_size("2m"), ss.Cluster.parse(cluster), recipe, layout or ss.Layout.ddp()
    )


def wait_for(condition: Callable[[], object], seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not true in time"
        time.sleep(0.1)


def list_processes(folder: Path) -> list[str]:
    """Return the command lines of the run's supervisors, launchers and ranks."""
    lines = []
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
        except psutil.Error:
            continue
        is_ours = str(folder) in line and "shardscope.runs.launch" in line
        if is_ours and process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            lines.append(line)
    return lines


def assert_nothing_is_left(run: Run, slurm: TwoNodeSlurm) -> None:
    assert slurm.wait_until_empty() == []
    wait_for(lambda: not list_processes(run.folder), 30)
    assert not (run.folder / "task.pkl").exists()
    assert run.folder.stat().st_mode & 0o777 == 0o700
    assert (run.folder / "slurm").stat().st_mode & 0o777 == 0o700


def losses(run: Run) -> list[float]:
    assert run.status == "finished", (run.status, run.reason, run.error, run.logs(0))
    return [float(record["loss"]) for record in run.metrics() if record["rank"] == 0 and "loss" in record]


def train_until_stopped(ctx: object) -> None:
    """Log a step ten times a second until a stop is requested; then save."""
    import time

    import torch
    import torch.distributed as dist

    while not ctx.should_stop:
        dist.all_reduce(torch.ones(1))
        ctx.log(value=1.0)
        time.sleep(0.1)
    (ctx.folder / f"saved-{ctx.rank}").write_text("saved")


def wait_until_running(run: Run) -> None:
    """Wait until both ranks have logged, and for the status, which follows them."""
    wait_for(lambda: {record["rank"] for record in run.metrics()} == {0, 1} or run.status in FINAL)
    wait_for(lambda: run.status not in ("queued", "starting"), 60)
    assert run.status == "running", (run.status, run.reason, run.error)


def launch_endless(slurm: TwoNodeSlurm, folder: Path) -> Run:
    """Launch a run that both nodes have begun."""
    run = ss.launch(make_plan("2x1xcpu"), train_until_stopped, folder=folder, on=ss.Slurm())
    wait_until_running(run)
    return run
