"""Exported scripts really train on two CPU ranks, under torchrun and without us.

What each layout's script makes, and its losses, are in test_export_equals_run.py: its ranks start once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shardscope as ss
from needs import few, needs, skip_without

needs("torch")
needs("transformers")

SECONDS = 300
"""DeepSpeed compiles its shared-memory collectives where they are not cached."""

PROBE = '''
"""train.py itself, and what its training is made of."""
import json, os, sys
from pathlib import Path

import train

class Seen(train.Training):
    def __init__(self, *given):
        super().__init__(*given)
        engine = getattr(self, "engine", None)
        model = engine.module if engine is not None else self.model
        parameters = list(model.parameters())
        Path(f"made-{os.environ['RANK']}.json").write_text(json.dumps({
            "wrapper": type(engine or self.model).__name__,
            "kinds": sorted({type(parameter).__name__ for parameter in parameters}),
            "here": sum(
                getattr(parameter, "ds_tensor", getattr(parameter, "_local_tensor", parameter)).numel()
                for parameter in parameters
            ),
            "trained": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
            "stage": engine.zero_optimization_stage() if engine is not None else None,
            "ours": [name for name in sys.modules if name.startswith("shardscope")],
        }))

train.Training = Seen
train.main()
'''

MODEL = ss.Architecture.of_size("2m")
RECIPE = {"seq_len": 64, "micro_batch_size": 2, "global_batch_size": 8}


OWN_FILES = {"ddp": ss.Layout.ddp(), "fsdp2": ss.Layout.fsdp2(), "deepspeed": ss.Layout.zero(3)}
"""Frameworks whose train.py is a file of the toolkit, and a layout of each."""
STARTS = {
    "torchrun": ["./torchrun.sh"],
    "accelerate launch": [
        *("accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
        *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0", "train.py"),
    ],
}
"""Ways to start it. "--multi_gpu" is accelerate's word for processes of torchrun, on CPUs too."""


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("framework", OWN_FILES)
def test_train_py_trains(framework: str, start: str, tmp_path: Path) -> None:
    """Copied to a folder and started there on two ranks, it trains and saves a model that opens."""
    if framework in ("deepspeed", "megatron"):
        skip_without(framework)
    plan = ss.Plan(MODEL, ss.Cluster.parse("2xcpu"), ss.Recipe(**RECIPE), OWN_FILES[framework])
    plan.export(tmp_path)
    options = ["--steps", "8", "--learning-rate", "1e-3", "--save", "saved"]
    done = ran([*STARTS[start], *options], tmp_path)
    losses = [float(line.split()[3]) for line in done.splitlines() if line.startswith("step ")]
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 1.0, losses
    from transformers import AutoModelForCausalLM

    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert saved.num_parameters() == MODEL.num_parameters


def ran(command: list[str], folder: Path) -> str:
    """What a command in ``folder`` prints; without this checkout on its path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=SECONDS, check=False, env=environment, cwd=folder
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def trained(plan: ss.Plan, folder: Path, steps: int = 8) -> tuple[dict[str, Any], list[float]]:
    """What the ranks made, and the loss of each step."""
    plan.export(folder)
    (folder / "probe.py").write_text(PROBE)
    command = (folder / "torchrun.sh").read_text().replace(" train.py ", " probe.py ")
    assert " probe.py " in command
    (folder / "probe.sh").write_text(command)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", str(folder / "probe.sh"), "--steps", str(steps), "--learning-rate", "1e-3"],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env=environment,
        cwd=folder.parent,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    made = [json.loads(file.read_text()) for file in sorted(folder.glob("made-*.json"))]
    losses = [float(line.split()[3]) for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(made) == plan.world_size
    assert len(losses) == steps
    assert made[0]["ours"] == []
    return made[0], losses


LAYOUTS = {
    "megatron": ss.Layout.megatron(pp=2),
}


@pytest.mark.parametrize("name", few(LAYOUTS, {"megatron"}))
def test_a_plain_script_trains(name: str, tmp_path: Path) -> None:
    for package in ("deepspeed", "megatron"):
        if LAYOUTS[name].framework == package:
            skip_without(package)
    plan = ss.Plan(MODEL, ss.Cluster.parse("2xcpu"), ss.Recipe(**RECIPE), LAYOUTS[name])
    made, losses = trained(plan, tmp_path)
    assert losses[-1] < losses[0] - 1.0, losses
    assert ("DTensor" in made["kinds"]) == ("fsdp2" in name)
    embedding = MODEL.vocab_size * MODEL.hidden_size
    assert abs(made["here"] - MODEL.num_parameters // 2) <= embedding


def test_ranks_other_than_the_plan_s_are_refused(tmp_path: Path) -> None:
    plan = ss.Plan(MODEL, ss.Cluster.parse("2xcpu"), ss.Recipe(**RECIPE), ss.Layout.ddp())
    plan.export(tmp_path)
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env={**os.environ, "RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0"},
    )
    assert done.returncode == 1
    assert "the plan is for 2 ranks, and these are 3" in done.stderr
