"""Exported scripts really train on two CPU ranks, under torchrun and without us.

What each layout's script makes, and its losses, are in test_export_equals_run.py: its ranks start once.
"""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from tests.requirements import few, needs, skip_without, thorough

import shardscope as ss

needs("torch")
needs("transformers")

from exported_plans import export_with_script  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from shardscope.training.data.tokenizer import SHIPPED_TOKENIZER  # noqa: E402

SECONDS = 300
"""DeepSpeed compiles its shared-memory collectives where they are not cached."""

MODEL = ss.Architecture.of_size("2m")
RECIPE = {"seq_len": 64, "micro_batch_size": 2, "global_batch_size": 8}


LAYOUTS = {
    "ddp": ss.Layout.ddp(),
    "fsdp2": ss.Layout.fsdp2(),
    "deepspeed": ss.Layout.zero(3),
    "megatron": ss.Layout.megatron(tp=2),
}
STARTS = {
    "torchrun": ["torchrun", "--standalone", "--nproc-per-node", "2"],
    "accelerate launch": [
        *("accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
        *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
    ],
}
"""Ways to start it. "--multi_gpu" is accelerate's word for processes of torchrun, on CPUs too."""
DEEPSPEED = ["deepspeed", "--num_accelerators", "2", "--master_port", "29641"]
KEPT = [("fsdp2", "accelerate launch")]
ON_CPU = Path(__file__).with_name("megatron_on_cpu.py")


@pytest.mark.parametrize(("framework", "start"), few(product(LAYOUTS, STARTS), KEPT))
def test_exported_train_py_trains(framework: str, start: str, tmp_path: Path) -> None:
    """Copied to a folder and started there on two ranks, it trains and saves a model that opens."""
    if framework in ("deepspeed", "megatron"):
        skip_without(framework)
    plan = ss.Plan(MODEL, ss.Cluster.parse("2xcpu"), ss.Recipe(**RECIPE), LAYOUTS[framework])
    export_with_script(plan, tmp_path)
    script = [str(ON_CPU), "train.py"] if framework == "megatron" else ["train.py"]
    options = ["--steps", "8", "--learning-rate", "1e-3", "--save", "saved"]
    options += ["--tokenizer", str(SHIPPED_TOKENIZER)]
    done = run_command([*STARTS[start], *script, *options], tmp_path)
    losses = [float(line.split()[3]) for line in done.splitlines() if line.startswith("step ")]
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 1.0, losses
    from transformers import AutoModelForCausalLM, AutoTokenizer

    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert saved.num_parameters() == MODEL.num_parameters
    tokenizer, shipped = (
        AutoTokenizer.from_pretrained(tmp_path / "saved"),
        Tokenizer.from_file(str(SHIPPED_TOKENIZER)),
    )
    assert tokenizer("the white whale")["input_ids"] == shipped.encode("the white whale").ids
    assert tokenizer.eos_token_id == shipped.token_to_id("<|endoftext|>")


def run_command(command: list[str], folder: Path) -> str:
    """Run a command in ``folder`` without this checkout on its path; return its output."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=SECONDS, check=False, env=environment, cwd=folder
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@thorough()
def test_deepspeeds_own_launcher_starts_train_py(tmp_path: Path) -> None:
    """It adds ``--local_rank`` to the script's options, unless it is started with ``--no_local_rank``."""
    skip_without("deepspeed")
    plan = ss.Plan(MODEL, ss.Cluster.parse("2xcpu"), ss.Recipe(**RECIPE), ss.Layout.zero(2))
    plan.export(tmp_path)
    assert "step 2 loss" in run_command([*DEEPSPEED, "train.py", "--steps", "2"], tmp_path)


@thorough()
def test_exported_torchrun_sh_starts_train_py(tmp_path: Path) -> None:
    plan = ss.Plan(MODEL, ss.Cluster.parse("2xcpu"), ss.Recipe(**RECIPE), ss.Layout.ddp())
    plan.export(tmp_path)
    assert "step 2 loss" in run_command(["./torchrun.sh", "--steps", "2"], tmp_path)


@thorough()
def test_another_number_of_ranks_than_the_plans_raises(tmp_path: Path) -> None:
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
    assert "the plan has 2 ranks, and 3 were started" in done.stderr
