"""Exported scripts really train on two CPU ranks, under torchrun, as what the plan says and without us."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shardscope as ss
from needs import needs, needs_installed

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


@pytest.mark.parametrize(
    ("layout", "recipe"),
    [
        (ss.Layout.ddp(), {"recompute": "selective"}),
        (ss.Layout.fsdp2(), {"recompute": "full", "recompute_interval": 2}),
        (ss.Layout.fsdp2(replicate=2), {"precision": "fp32", "optimizer": "adamw_foreach"}),
        (ss.Layout.fsdp2(offload="cpu", reshard_after_forward=False), {"precision": "bf16"}),
    ],
    ids=["ddp", "fsdp2", "hsdp", "offload"],
)
def test_a_plain_script_trains(layout: Any, recipe: dict[str, Any], tmp_path: Path) -> None:
    plan = ss.Plan(MODEL, ss.Cluster.parse("2xcpu"), ss.Recipe(**RECIPE, **recipe), layout)
    made, losses = trained(plan, tmp_path)
    assert losses[-1] < losses[0] - 1.0, losses
    if layout.framework == "ddp":
        assert made["wrapper"] == "DistributedDataParallel"
        assert made["here"] == MODEL.num_parameters
        return
    assert made["kinds"] == ["DTensor"]
    assert made["here"] == MODEL.num_parameters // plan.degrees.shard


@needs_installed("peft")
@pytest.mark.parametrize("layout", [ss.Layout.ddp(), ss.Layout.fsdp2()], ids=["ddp", "fsdp2"])
def test_a_plain_script_trains_adapters(layout: Any, tmp_path: Path) -> None:
    recipe = ss.Recipe(**RECIPE, method="lora", lora_rank=8)
    plan = ss.Plan(MODEL, ss.Cluster.parse("2xcpu"), recipe, layout)
    made, losses = trained(plan, tmp_path)
    shapes = [shape for index in range(MODEL.num_hidden_layers) for shape in MODEL.layer_linears(index)]
    attention = [shape for target, shape in shapes if target in ("q_proj", "k_proj", "v_proj", "o_proj")]
    assert made["trained"] == 8 * sum(sum(shape) for shape in attention)
    assert losses[-1] < losses[0], losses


@needs_installed("deepspeed")
@pytest.mark.parametrize("stage", [1, 3])
def test_a_plain_deepspeed_script_trains(stage: int, tmp_path: Path) -> None:
    plan = ss.Plan(MODEL, ss.Cluster.parse("2xcpu"), ss.Recipe(**RECIPE), ss.Layout.zero(stage))
    made, losses = trained(plan, tmp_path)
    assert losses[-1] < losses[0] - 1.0, losses
    assert made["wrapper"] == "DeepSpeedEngine"
    assert made["stage"] == stage
    whole = MODEL.num_parameters
    # Stage 3 keeps a part of each tensor, rounded up.
    assert made["here"] == whole if stage == 1 else whole // 2 <= made["here"] <= whole // 2 + 1000


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
