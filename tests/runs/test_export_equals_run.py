"""The plain script that a plan exports and the run of the same plan: the same losses, step by step."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.needs import needs

torch = needs("torch")
needs("transformers")
needs("tokenizers")

from two_ranks import StandInContext, on_ranks, tiny_llama, tiny_plan  # noqa: E402

import shardscope as ss  # noqa: E402
from shardscope.frameworks.deepspeed.process_groups import connect  # noqa: E402
from shardscope.frameworks.registry import engine_for, why_not_trained  # noqa: E402
from shardscope.training.tokenizer import SHIPPED_TEXT, SHIPPED_TOKENIZER  # noqa: E402

NUM_STEPS = 5
CLOSE = 1e-4
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp", {"num_micro_batches": 2}),
    "ddp bf16": ("ddp", {"precision": "bf16-mixed"}),
    "fsdp2": ("fsdp2", {"num_micro_batches": 2}),
    "fsdp2 tp": ("fsdp2", {"layout": {"tp": 2}}),
    "zero-1": ("zero", {"layout": {"stage": 1}}),
    "zero-3": ("zero", {"layout": {"stage": 3}, "num_micro_batches": 2}),
}


def plan_of(name: str) -> ss.Plan:
    framework, fields = PLANS[name]
    return tiny_plan(framework, 2, **fields)


def run_losses(ctx: StandInContext, plan: ss.Plan, text: Path) -> list[float]:
    """What ``Pretrain`` logs."""
    own = replace(ctx, plan=plan, lines=[], records={})
    own.engine = engine_for(plan)(own)
    with contextlib.redirect_stdout(io.StringIO()):
        ss.Pretrain(num_steps=NUM_STEPS, text=text)(own)
    return [line["loss"] for line in own.lines if "loss" in line]


def script_losses(ctx: StandInContext, folder: Path, text: Path) -> list[float]:
    """What ``train.py`` prints, on rank 0; its process group is the one that is up."""
    spec = importlib.util.spec_from_file_location(
        f"exported_{folder.name.replace('-', '_')}", folder / "train.py"
    )
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.connect = lambda device: None
    script.dist = Kept(script.dist)
    words = ["--steps", str(NUM_STEPS), "--text", str(text), "--tokenizer", str(SHIPPED_TOKENIZER)]
    arguments, sys.argv = sys.argv, ["train.py", *words]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        script.main()
    sys.argv = arguments
    return [float(line.split()[3]) for line in printed.getvalue().splitlines() if line.startswith("step ")]


class Kept:
    """``torch.distributed`` whose group outlives a script."""

    def __init__(self, real: Any) -> None:
        self.real = real

    def __getattr__(self, name: str) -> Any:
        return (lambda: None) if name == "destroy_process_group" else getattr(self.real, name)


def both(ctx: StandInContext) -> dict[str, Any]:
    """Losses of run and script of every plan, in one spawn of ranks."""
    os.environ.update(RANK=str(ctx.rank), LOCAL_RANK=str(ctx.rank), WORLD_SIZE="2", DS_ACCELERATOR="cpu")
    text, found = ctx.folder / "text.txt", {}
    for name in PLANS:
        folder = ctx.folder / name.replace(" ", "-")
        if (folder / "train.py").exists():
            run = run_losses(ctx, plan_of(name), text)
            if plan_of(name).layout.framework == "deepspeed":
                connect(importlib.import_module("deepspeed"), "gloo", ctx.rank)
            found[name] = {"run": run, "script": script_losses(ctx, folder, text)}
    return found


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    needs("deepspeed")
    folder = tmp_path_factory.mktemp("export")
    (folder / "text.txt").write_text(SHIPPED_TEXT.read_text(encoding="utf-8")[:60_000], encoding="utf-8")
    for name in PLANS:
        if why_not_trained(plan_of(name)) is None:
            plan_of(name).export(folder / name.replace(" ", "-"))
    return on_ranks(2, plan_of("ddp"), both, folder)


@pytest.mark.parametrize("name", list(PLANS))
def test_the_exported_script_has_the_losses_of_the_run(name: str, losses: list[dict[str, Any]]) -> None:
    run, script = losses[0][name]["run"], losses[0][name]["script"]
    assert len(run) == len(script) == NUM_STEPS
    assert run[-1] < run[0]
    # Half precision adds up in another order where the two call different kernels.
    close = 1e-2 if "bf16" in name else CLOSE
    assert script == pytest.approx(run, abs=close), (run, script)


def test_the_shipped_text_has_the_same_tokens_in_a_script() -> None:
    from tokenizers import Tokenizer

    from shardscope.training.data import read_tokens

    whole = Tokenizer.from_file(str(SHIPPED_TOKENIZER)).encode(SHIPPED_TEXT.read_text(encoding="utf-8")).ids
    assert [*whole, 0] == read_tokens(None).tolist()
    assert tiny_llama().vocab_size >= max(whole)
