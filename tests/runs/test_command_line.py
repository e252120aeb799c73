"""``shardscope launch`` starts real ranks, with or without waiting, and its other commands find the run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from run_helpers import seconds_until
from tests.requirements import needs

import shardscope as ss

needs("accelerate")

pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("bounded_time", "nothing_left")]

PLAN = ("--model", "2m", "--cluster", "2xcpu", "--layout", "ddp")
RECIPE = ("--recipe", "seq_len=64", "global_batch_size=4", "precision=fp32")


def run(folder: Path, *arguments: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "shardscope.cli.main", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


def test_launch_waits_for_three_steps_and_other_commands_show_the_run(tmp_path: Path) -> None:
    task = ("--task", "pretrain", "num_steps=3", "profile=true", "export=true")
    shown = run(tmp_path, "launch", *PLAN, *RECIPE, *task, "--name", "three", "--wait")
    assert "step 3 of 3, loss" in shown and "finished" in shown
    launched = ss.Run.attach(tmp_path / "runs" / "three")
    model = f"model   {launched.model}"
    assert "".join(model.split()) in "".join(shown.split()), "wrapped at 80 columns"
    assert launched.status == "finished" and launched.plan.recipe.seq_len == 64
    attached: dict[str, Any] = json.loads(run(tmp_path, "attach", "three", "--json"))
    losses = [record["loss"] for record in launched.metrics() if record["rank"] == 0 and "loss" in record]
    assert (attached["num_steps_done"], attached["loss"]) == (3, losses[-1])
    assert attached["model"] == str(launched.model)
    assert "three" in run(tmp_path, "runs")
    assert "step 3 of 3" in run(tmp_path, "logs", "three")
    assert "2 ranks" in run(tmp_path, "trace", "three")


def test_a_run_outlives_launch_and_is_stopped_by_name(tmp_path: Path) -> None:
    task = ("--task", "pretrain", "num_steps=100000")
    launched = json.loads(run(tmp_path, "launch", *PLAN, *RECIPE, *task, "--name", "long", "--json"))
    assert launched["run"] == "long" and launched["num_steps"] == 100000
    handle = ss.Run.attach(launched["folder"])
    seconds_until(lambda: bool(handle.metrics()))
    # Not "running", as if the stop had no effect.
    assert json.loads(run(tmp_path, "stop", "long", "--json"))["status"] in ("stopping", "stopped")
    assert json.loads(run(tmp_path, "stop", "long", "--wait", "--json"))["status"] == "stopped"


def test_a_run_that_fails_ends_launch_with_1_and_the_ranks_error(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("from accelerate import Accelerator\nAccelerator()\nraise RuntimeError('no data')\n")
    task = ("--task", "script", f"source={script}")
    errors = run(tmp_path, "launch", *PLAN, *RECIPE, *task, "--name", "fails", "--wait", code=1)
    assert "fails failed" in errors and "no data" in errors
