"""Exported scripts that lose one of two CPU ranks, started again: they continue with the same losses."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.requirements import few, needs, skip_without

import shardscope as ss

needs("torch")
needs("transformers")

from exported_plans import export_with_script  # noqa: E402

SECONDS = 300
CLOSE = 2e-6
"""Losses are printed with six digits."""
NUM_STEPS, EVERY = 20, 4
KILLED_AFTER = EVERY + 1
"""Ranks may take some more steps until they are killed, but not all."""

# Dropout: its random numbers continue too.
ARCHITECTURE = ss.Architecture.of_size("2m")
RECIPE: dict[str, Any] = {"seq_len": 64, "micro_batch_size": 2, "global_batch_size": 8, "dropout": 0.1}
LAYOUTS = {
    "ddp": (ss.Layout.ddp(), {}),
    "ddp lora": (ss.Layout.ddp(), {"method": "lora", "precision": "fp16-mixed"}),
    "fsdp2": (ss.Layout.fsdp2(), {}),
    "fsdp2 hsdp offload": (ss.Layout.fsdp2(replicate=2, offload="cpu"), {"precision": "bf16"}),
    "zero-0": (ss.Layout.zero(0), {}),
    "zero-1": (ss.Layout.zero(1), {"precision": "fp32"}),
    "zero-2": (ss.Layout.zero(2), {}),
    "zero-3": (ss.Layout.zero(3), {}),
    "megatron tp": (ss.Layout.megatron(tp=2), {"dropout": 0.0, "precision": "fp32"}),
    "megatron dp bf16": (
        ss.Layout.megatron(overlap_grad_reduce=True, overlap_param_gather=True),
        {"dropout": 0.0},
    ),
    "megatron replicas bf16": (ss.Layout.megatron(distributed_optimizer=False), {"dropout": 0.0}),
}
ON_CPU = Path(__file__).with_name("megatron_on_cpu.py")


def read_losses(output: str) -> dict[int, float]:
    """Return the losses that rank 0 prints, by step."""
    lines = [line.split() for line in output.splitlines() if line.startswith("step ")]
    return {int(words[1]): float(words[3]) for words in lines}


def start_script(folder: Path) -> subprocess.Popen[str]:
    """Start the exported ``torchrun.sh``, without this checkout on its path; Megatron-core's on CPU ranks."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    options = ["--steps", str(NUM_STEPS), "--checkpoints", "checkpoints", "--checkpoint-every", str(EVERY)]
    command = ["./torchrun.sh"]
    if (folder / "megatron_model.py").exists():
        command = ["torchrun", "--standalone", "--nproc-per-node", "2", str(ON_CPU), "train.py"]
    return subprocess.Popen(
        [*command, *options, "--learning-rate", "1e-3"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def kill_a_rank(process: subprocess.Popen[str], after: int) -> str:
    """Kill a rank when step ``after`` is printed, and wait for the end of the others. Return the output."""
    assert process.stdout is not None
    output = ""
    for line in process.stdout:
        output += line
        if line.startswith(f"step {after} "):
            rank = psutil.Process(process.pid).children()[-1]
            rank.kill()
    assert process.wait(SECONDS) != 0, "torchrun reports the failure"
    return output


@pytest.mark.parametrize("name", few(LAYOUTS, {"fsdp2"}))
def test_a_killed_script_continues_with_the_same_losses(name: str, tmp_path: Path) -> None:
    layout, recipe = LAYOUTS[name]
    if name.startswith("zero"):
        skip_without("deepspeed")
    if name.startswith("megatron"):
        skip_without("megatron")
    if recipe.get("method") == "lora":
        skip_without("peft")
    plan = ss.Plan(ARCHITECTURE, ss.Cluster.parse("2xcpu"), ss.Recipe(**{**RECIPE, **recipe}), layout)
    export_with_script(plan, tmp_path)
    straight, _ = start_script(tmp_path).communicate(timeout=SECONDS)
    losses = read_losses(straight)
    assert list(losses) == list(range(1, NUM_STEPS + 1)), straight[-3000:]
    shutil.rmtree(tmp_path / "checkpoints")
    killed = read_losses(kill_a_rank(start_script(tmp_path), KILLED_AFTER))
    assert killed == pytest.approx({step: losses[step] for step in killed}, abs=CLOSE)
    # What is left of a save during which the ranks were killed.
    (tmp_path / "checkpoints" / "partial").mkdir(exist_ok=True)
    if name.startswith("zero"):
        interrupted = tmp_path / "checkpoints" / f"step-{NUM_STEPS}"
        interrupted.mkdir()
        (interrupted / "half a file").write_text("")
    continued, _ = start_script(tmp_path).communicate(timeout=SECONDS)
    found = re.search(r"^continues after step (\d+), from checkpoints/step-\1", continued, re.MULTILINE)
    assert found is not None, continued[-3000:]
    done = int(found[1])
    assert done % EVERY == 0 and EVERY <= done < NUM_STEPS
    expected = {step: losses[step] for step in range(done + 1, NUM_STEPS + 1)}
    assert read_losses(continued) == pytest.approx(expected, abs=CLOSE)
    kept = {path.name.split(".")[0] for path in (tmp_path / "checkpoints").glob("step-*")}
    assert kept == {f"step-{NUM_STEPS - EVERY}", f"step-{NUM_STEPS}"}, "the last two"
    assert not list((tmp_path / "checkpoints").glob("step-*/half a file"))


def test_a_save_that_fails_leaves_the_checkpoint_before_as_the_latest(
    tmp_path: Path,
) -> None:
    skip_without("deepspeed")
    import torch.distributed as dist

    from shardscope.frameworks.deepspeed.files.checkpoints import Checkpoints

    class Engine:
        def save_checkpoint(self, folder: str, tag: str, save_latest: bool = True) -> None:
            if save_latest:
                (Path(folder) / "latest").write_text(tag)
            if tag == "step-4":
                raise OSError("no space left on device")

    options = Namespace(checkpoints=str(tmp_path), checkpoint_every=2, steps=9)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        checkpoints = Checkpoints(options, Engine())
        checkpoints.save(2)
        with pytest.raises(OSError, match="no space"):
            checkpoints.save(4)
    finally:
        dist.destroy_process_group()
    assert (tmp_path / "latest").read_text() == "step-2"
    assert (tmp_path / "step-2").is_dir()
