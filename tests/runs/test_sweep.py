"""A sweep of real runs on CPU ranks: one is stopped, and another kernel continues what was interrupted."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from run_helpers import seconds_until
from tests.requirements import needs, thorough

needs("torch")
needs("transformers")

from gloo_ranks import tiny_plan  # noqa: E402

import shardscope as ss  # noqa: E402
from shardscope.runs.explain.compare import Runs  # noqa: E402
from shardscope.runs.sweep import Sweep  # noqa: E402

pytestmark = pytest.mark.usefixtures("bounded_time", "nothing_left")

KERNEL = """
import os, sys, time
sys.path[:0] = [{tests!r}]
import shardscope as ss
from gloo_ranks import tiny_plan
sweep = ss.sweep(tiny_plan("ddp", 2), ss.Pretrain(num_steps=200), {over!r}, name="lr", folder={folder!r})
while not sweep[0].metrics():
    time.sleep(0.05)
os._exit(1)
"""


@thorough()
def test_a_sweep_goes_on_after_its_kernel_and_after_a_stop(tmp_path: Path) -> None:
    over = {"learning_rate": [1e-3, 1e-2]}
    code = KERNEL.format(tests=str(Path(__file__).parent), over=over, folder=str(tmp_path))
    subprocess.run([sys.executable, "-c", code], check=False, timeout=100)

    def continue_sweep() -> Sweep:
        return ss.sweep(tiny_plan("ddp", 2), ss.Pretrain(num_steps=200), over, name="lr", folder=tmp_path)

    # The kernel is gone, and its run is under way. It is adopted, and the other one waits.
    sweep = continue_sweep()
    assert list(sweep.to_frame()["status"]) == ["running", "waiting"]
    assert sweep[0].name == "lr,learning_rate=0.001"
    sweep.stop()
    assert sweep.wait(60) == "stopped" and "sweep.stop() was called" in sweep[0].reason
    num_done = len({line["step"] for line in sweep[0].metrics()})

    # The first run goes on from its checkpoint, the second one starts. Then a single one is stopped.
    sweep = continue_sweep()
    assert sweep[0].name == "lr,learning_rate=0.001-2"
    assert sweep[0].wait(100) == "finished", sweep[0].error
    assert sorted({line["step"] for line in sweep[0].metrics()}) == list(range(num_done, 200))
    seconds_until(lambda: len(sweep) == 2 and sweep[1].metrics())
    sweep[1].stop()
    assert sweep.wait(60) == "finished" and [run.status for run in sweep] == ["finished", "stopped"]
    assert sweep.best() is sweep[0] and isinstance(sweep.runs, Runs)
    assert list(sweep.curves().columns) == [run.name for run in sweep]
    # Nothing is left to launch: what ended stays.
    assert [run.name for run in continue_sweep()] == [run.name for run in sweep]


@thorough()
def test_a_longer_run_continues_from_the_best_of_a_sweep(tmp_path: Path) -> None:
    task = ss.Pretrain(num_steps=6, save_checkpoint=True)
    plan = tiny_plan("ddp", 2)
    sweep = ss.sweep(plan, task, {"learning_rate": [1e-4, 1e-2]}, name="lr", folder=tmp_path)
    assert sweep.wait(200) == "finished", sweep.to_frame()
    best = sweep.best()
    rate = float(best.task_fields["learning_rate"])
    longer = replace(task, num_steps=9, learning_rate=rate, resume=best.folder)
    run = ss.launch(plan, longer, folder=tmp_path, name="longer")
    assert run.wait(100) == "finished", (run.reason, run.error)
    assert rate == 1e-2
    assert [line["step"] for line in run.metrics() if line["rank"] == 0 and "loss" in line] == [6, 7, 8]
