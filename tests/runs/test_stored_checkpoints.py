"""A checkpoint that an earlier version wrote is trained on, named by its path: `make test-resume` does it."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tests.requirements import needs, skip_without

import shardscope as ss
from shardscope.records.json_files import read_json
from shardscope.training.checkpoints.choice import find_newest_checkpoint
from shardscope.training.checkpoints.folders import POSITION_FILE

needs("torch")
needs("transformers")

STORED = Path(__file__).parents[1] / "fixtures" / "formats" / "stored_runs"
NEEDED = {"fsdp2": "torch", "zero": "deepspeed", "megatron": "megatron"}


@pytest.mark.parametrize("name", NEEDED)
@pytest.mark.usefixtures("bounded_time", "nothing_left")
@pytest.mark.skipif(
    os.environ.get("SHARDSCOPE_RESUME") != "all", reason="a launch each; `make test-resume` runs them"
)
def test_training_resumes_from_a_stored_checkpoint(name: str, tmp_path: Path) -> None:
    skip_without(NEEDED[name])
    stored = tmp_path / "stored"
    shutil.copytree(STORED / name, stored)
    (stored / "ranks").rename(tmp_path / "ranks of another day")
    checkpoint = find_newest_checkpoint(stored)
    assert checkpoint is not None
    done = (read_json(checkpoint / POSITION_FILE) or {})["num_steps_done"]
    before = [line for line in ss.Run.attach(stored).metrics() if line["rank"] == 0]

    # The plan is the stored one on this machine, whose memory is another.
    plan = ss.Run.attach(stored).plan
    plan = replace(plan, cluster=ss.Cluster.parse("2xcpu"))
    task = ss.Pretrain(num_steps=done + 3, seed=3, resume=checkpoint)
    run = ss.launch(plan, task, folder=tmp_path, name="continued")
    assert run.wait(120) == "finished", run.error
    lines = [line for line in run.metrics() if line["rank"] == 0]
    assert [line["step"] for line in lines] == [done, done + 1, done + 2]
    assert abs(lines[0]["loss"] - before[-1]["loss"]) < 0.1
