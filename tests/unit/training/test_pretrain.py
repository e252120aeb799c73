"""Tests of ``Pretrain``: created without torch, invalid fields, and checks of plans before a launch."""

from __future__ import annotations

import importlib.util
import pickle
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardscope as ss
from shardscope.core.plan import Plan
from shardscope.frameworks.registry import frameworks, why_not_trained
from shardscope.training.tasks.pretrain import Pretrain


def test_creating_a_task_imports_no_torch() -> None:
    code = (
        "import sys; from shardscope.training.tasks.pretrain import Pretrain; "
        "import shardscope.frameworks.fsdp2; "
        "import shardscope.frameworks.ddp, shardscope.training.engine; Pretrain(num_steps=3); "
        "import shardscope as ss; from shardscope.frameworks.registry import why_not_trained; "
        "plan = ss.Plan(ss.Architecture.of_size('2m'), ss.Cluster.parse('2xcpu'), ss.Recipe(seq_len=64), "
        "ss.Layout.fsdp2()); Pretrain().check(plan); assert why_not_trained(plan) is None; "
        "heavy = {'torch', 'transformers', 'tokenizers'} & set(sys.modules); sys.exit(bool(heavy))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


@pytest.mark.parametrize(
    ("field", "value", "fix"),
    [
        ("num_steps", 0, "1"),
        ("num_steps", True, "1"),
        ("num_steps", "40", "40"),
        ("num_steps", 10.5, "10"),
        ("num_steps", "ten", "50"),
        ("num_steps", None, "50"),
        ("learning_rate", "fast", r"0\.001"),
        ("learning_rate", float("nan"), r"0\.001"),
        ("weight_decay", None, r"0\.1"),
        ("warmup", "short", r"0\.03"),
        ("learning_rate", -1.0, r"0\.001"),
        ("learning_rate", float("inf"), "10"),
        ("learning_rate", 10**400, "10"),
        ("warmup", 51, "50"),
        ("warmup", 1.5, "2"),
        ("warmup", -0.1, "0"),
        ("warmup", float("nan"), r"0\.03"),
        ("schedule", "cosin", "'cosine'"),
        ("weight_decay", 2.0, "1"),
        ("seed", -1, "0"),
        ("profile", 1, "True"),
        ("log_every", 0, "1"),
        ("save_checkpoint", "yes", "True"),
        ("text", "/no/such/file", "None"),
        ("text", 7, "None"),
        ("resume", "/no/such/folder", "resume=True, which starts at step 0 if there is none"),
    ],
)
def test_an_invalid_field_is_refused_with_a_fix(field: str, value: Any, fix: str) -> None:
    with pytest.raises(ValueError, match=rf"^Pretrain\.{field} is .*; allowed: .*Nearest fix: {fix}\.$"):
        Pretrain(**{field: value})


@pytest.mark.parametrize(
    ("make", "fix"),
    [
        (lambda: Pretrain(lr=1e-3), "learning_rate"),  # type: ignore[call-arg]
        (lambda: ss.Finetune("folder", epochs=3), "num_epochs"),  # type: ignore[arg-type, call-arg]
        (lambda: ss.Script("train.py", args=["--seed", "1"]), "arguments"),  # type: ignore[call-arg]
        (lambda: ss.Slurm(partiton="h100"), "partition"),  # type: ignore[call-arg]
        (lambda: ss.Ray(adress="auto"), "address"),  # type: ignore[call-arg]
    ],
    ids=["pretrain", "finetune", "script", "slurm", "ray"],
)
def test_a_misspelt_option_is_refused_with_the_nearest(make: Any, fix: str) -> None:
    with pytest.raises(ValueError, match=rf"key is '.*'; allowed: .*{fix}.*Nearest fix: '{fix}'\.$"):
        make()


def test_numbers_of_numpys_become_pythons() -> None:
    """The run folder left out num_steps of a frame's column, so that the run had no length."""
    task = Pretrain(num_steps=np.int64(3), learning_rate=np.float32(0.5), warmup=np.float32(0.25))  # type: ignore[arg-type]
    assert (task.num_steps, task.learning_rate, task.warmup) == (3, 0.5, 0.25)
    assert [type(value) for value in (task.num_steps, task.learning_rate, task.warmup)] == [int, float, float]


def test_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text("whale")
    monkeypatch.chdir(tmp_path)
    assert Pretrain(text="text.txt").text == tmp_path / "text.txt"  # type: ignore[arg-type]


def test_a_task_can_be_pickled() -> None:
    task = Pretrain(num_steps=7, learning_rate=1e-4)
    assert pickle.loads(pickle.dumps(task)) == task


@pytest.mark.parametrize(
    ("num_left", "expected"),
    [(1, (0, 0, 1)), (2, (0, 1, 1)), (3, (0, 1, 2)), (4, (0, 1, 3)), (5, (1, 1, 3)), (6, (2, 1, 3))],
)
def test_a_short_run_is_recorded_too(num_left: int, expected: tuple[int, int, int]) -> None:
    from shardscope.training.recording import plan_recording

    assert plan_recording(num_left, 3, 2) == expected
    assert plan_recording(1000, 3, 2) == (2, 1, 3)


def make_plan(layout: Any = None, cluster: str = "4xcpu", vocab_size: int = 2048, **recipe: Any) -> Plan:
    arch = replace(ss.Architecture.of_size("2m"), vocab_size=vocab_size, num_hidden_layers=4)
    fields = {"seq_len": 64, "global_batch_size": 64, **recipe}
    return Plan(arch, ss.Cluster.parse(cluster), ss.Recipe(**fields), layout or ss.Layout.ddp())


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused() -> None:
    Pretrain().check(make_plan())
    Pretrain().check(make_plan(vocab_size=128_256))
    with pytest.raises(ValueError, match=r"Architecture.vocab_size is 512; allowed: at least 2,048"):
        Pretrain().check(make_plan(vocab_size=512))
    with pytest.raises(ValueError, match=r"Recipe.seq_len is 1; allowed: at least 2"):
        Pretrain().check(make_plan(seq_len=1))


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (
            ss.Layout.zero(stage=1, tp=2, offload_optimizer="cpu"),
            "Layout.offload_optimizer is 'cpu'; allowed: None with tp > 1: AutoTP with offloading",
        ),
        (ss.Layout.megatron(cp=2), "Layout.cp is 2; allowed: 1 to train with Megatron-core on CPU ranks: "),
        (
            ss.Layout.fsdp2(cp=2, tp=2),
            "Layout.tp is 2; allowed: 1 with cp > 1 to train with FSDP2: the two were never tested together",
        ),
    ],
    ids=repr,
)
def test_a_plan_that_no_engine_runs_is_refused_before_a_rank_starts(
    layout: Any, words: str, tmp_path: Path
) -> None:
    plan = make_plan(layout)
    why = why_not_trained(plan)
    assert why is not None and why.startswith(words)
    with pytest.raises(ValueError, match=re.escape(why)):
        ss.launch(plan, Pretrain(), folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_plans_that_engines_run_are_accepted() -> None:
    for layout in (ss.Layout.ddp(), ss.Layout.fsdp2(), ss.Layout.fsdp2(replicate=2, offload="cpu")):
        assert why_not_trained(make_plan(layout)) is None
    for name in frameworks:
        why = why_not_trained(make_plan(frameworks[name].layout_class()))
        assert why is None or "installed" in why


def hide_packages(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Make ``packages`` look as if they were not installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name in packages else find(name, *more)
    )


def test_adapters_require_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    hide_packages(monkeypatch, "peft")
    for layout in (ss.Layout.ddp(), ss.Layout.fsdp2()):
        why = why_not_trained(make_plan(layout, method="lora"))
        assert why is not None and why.endswith('Nearest fix: pip install "shardscope[train]".')

    assert "peft" in list_extra_packages("train")


@pytest.mark.parametrize(
    ("recipe", "field"),
    [
        ({"method": "qlora"}, "Recipe.method is 'qlora'"),
        ({"method": "lora", "quantization": "nf4"}, "Recipe.quantization is 'nf4'"),
        ({"method": "lora", "quantization": "int8", "precision": "bf16"}, "Recipe.quantization is 'int8'"),
    ],
)
def test_a_quantized_base_requires_bitsandbytes(
    recipe: dict[str, Any], field: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The error before a launch has the command that installs it."""
    hide_packages(monkeypatch, "bitsandbytes")
    plan = make_plan(**recipe)
    why = why_not_trained(plan)
    assert why is not None and why.startswith(field)
    assert why.endswith('Nearest fix: pip install "shardscope[qlora]".')
    with pytest.raises(ValueError, match=re.escape(why)):
        ss.launch(plan, Pretrain(), folder=tmp_path)
    assert not list(tmp_path.iterdir())
    assert "bitsandbytes" in list_extra_packages("qlora")


@pytest.mark.parametrize(
    ("layout", "recipe"),
    [
        (ss.Layout.fsdp2(), {"method": "qlora"}),
        (ss.Layout.fsdp2(), {"kernels": "compiled"}),
        (ss.Layout.zero(stage=3, offload_optimizer="nvme"), {}),
        (ss.Layout.megatron(tp=2), {}),
    ],
)
def test_a_machine_without_torch_plans_for_others(
    layout: ss.Layout, recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packages and compilers that a laptop lacks refuse no plan: its advice is the cluster's."""
    hide_packages(monkeypatch, "torch", "peft", "bitsandbytes", "deepspeed", "megatron")
    monkeypatch.setenv("PATH", "")
    assert why_not_trained(make_plan(layout, **recipe)) is None


def list_extra_packages(name: str) -> set[str]:
    """Return the packages that an extra of this project installs."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))
    found = project["project"]["optional-dependencies"][name]
    return {requirement.partition(">=")[0] for requirement in found}
