"""Tests of checks before a launch: checkpoints, and the engines that functions need."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.requirements import needs_installed
from tests.saved_checkpoints import write_checkpoint
from tests.weights_folders import write_folder

from shardscope import Architecture, Cluster, Finetune, Layout, Plan, Pretrain, Recipe
from shardscope.core.errors import FieldError
from shardscope.runs import runs
from shardscope.runs.launch.launch import launch
from shardscope.runs.launch.launch_checks import MAX_NAME_BYTES, check_name, check_request
from shardscope.runs.run import Run
from shardscope.runs.task_source import uses_engine
from shardscope.training.tasks.resumed_checkpoint import check_loads

L = Layout
TINY = Architecture.of_size("2m")


def make_plan(ranks: int, layout: Layout, **recipe: Any) -> Plan:
    fields = {"seq_len": 64, "global_batch_size": 4, "precision": "fp32", **recipe}
    return Plan(TINY, Cluster.parse(f"{ranks}xcpu"), Recipe(**fields), layout)


def save_checkpoint(folder: Path, plan: Plan, asked_name: str | None = None, **position: Any) -> Path:
    """Write a checkpoint as a run of ``plan`` leaves it, as far as a kernel reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    described = {"plan": json.loads(plan.to_json()), "asked_name": asked_name, "created": 1.0}
    (folder / "run.json").write_text(json.dumps(described))
    return write_checkpoint(folder / "checkpoints" / "step-000002", {"num_steps_done": 2, **position})


LOADS = {
    "megatron tp 2 to 1": (make_plan(2, L.megatron(tp=2)), make_plan(2, L.megatron())),
    "megatron pp 2 to 1": (make_plan(2, L.megatron(pp=2)), make_plan(2, L.megatron())),
    "megatron pp 1 to tp 2": (make_plan(2, L.megatron()), make_plan(2, L.megatron(tp=2))),
    "megatron to fewer ranks": (make_plan(2, L.megatron(tp=2)), make_plan(1, L.megatron())),
    "fsdp2 to fewer ranks": (make_plan(2, L.fsdp2()), make_plan(1, L.ddp())),
    "fsdp2 stages to others": (make_plan(2, L.fsdp2(pp=2)), make_plan(4, L.fsdp2(pp=2))),
    "the same Adam, many tensors at once": (
        make_plan(2, L.ddp()),
        make_plan(2, L.ddp(), optimizer="adamw_foreach"),
    ),
    "another precision": (make_plan(2, L.ddp()), make_plan(2, L.ddp(), precision="bf16")),
    "zero in bf16 by either name": (
        make_plan(2, L.zero(), precision="bf16"),
        make_plan(2, L.zero(), precision="bf16-mixed"),
    ),
    "zero as it was": (make_plan(2, L.zero(stage=2)), make_plan(2, L.zero(stage=2))),
}
REFUSED = {
    "zero-3 to more ranks": (
        make_plan(1, L.zero()),
        make_plan(2, L.zero()),
        "saved with 1 data-parallel rank, and this plan has 2 data-parallel ranks",
        "1 rank, as before",
        None,
    ),
    "zero-3 to fewer ranks": (
        make_plan(2, L.zero()),
        make_plan(1, L.zero()),
        "saved with 2 data-parallel ranks, and this plan has 1 data-parallel rank",
        "2 ranks, as before",
        None,
    ),
    "zero-2 to zero-3": (
        make_plan(2, L.zero(stage=2)),
        make_plan(2, L.zero(stage=3)),
        "saved with ZeRO stage 2, and this plan has ZeRO stage 3",
        "stage=2, as before",
        {"stage": 2},
    ),
    "zero-0 to fewer ranks": (
        make_plan(2, L.zero(stage=0)),
        make_plan(1, L.zero(stage=0)),
        "saved with 2 data-parallel ranks",
        "2 ranks, as before",
        None,
    ),
    "zero-3 in another type": (
        make_plan(2, L.zero()),
        make_plan(2, L.zero(), precision="bf16-mixed"),
        "saved with weights of fp32, and this plan has weights of bf16",
        "precision='fp32', as before",
        {"precision": "fp32"},
    ),
    "zero-2 to zero-1 in another type": (
        make_plan(2, L.zero(stage=2), precision="fp16-mixed"),
        make_plan(2, L.zero(stage=1)),
        "saved with ZeRO stage 2 and weights of fp16, and this plan has ZeRO stage 1 and weights of fp32",
        "stage=2, precision='fp16-mixed', as before",
        {"stage": 2, "precision": "fp16-mixed"},
    ),
    "zero-1 without stages": (
        make_plan(2, L.zero(stage=1, pp=2)),
        make_plan(2, L.zero(stage=1)),
        "saved with 1 data-parallel rank and 2 pipeline stages, and this plan has 2 data-parallel ranks and "
        "1 pipeline stage",
        "pp=2, as before",
        {"pp": 2},
    ),
    "megatron's optimizer replicated on every rank": (
        make_plan(2, L.megatron(tp=2)),
        make_plan(2, L.megatron(distributed_optimizer=False)),
        "saved with the distributed optimizer, and this plan has an optimizer replicated on every rank",
        "distributed_optimizer=True, as before",
        {"distributed_optimizer": True},
    ),
    "fsdp2 without stages": (
        make_plan(2, L.fsdp2(pp=2)),
        make_plan(2, L.fsdp2()),
        "saved with pipeline stages, and this plan has no pipeline stages",
        "pp=2, as before",
        {"pp": 2},
    ),
    "fsdp2 with stages": (
        make_plan(2, L.ddp()),
        make_plan(2, L.fsdp2(pp=2)),
        "saved with no pipeline stages, and this plan has pipeline stages",
        "pp=1, as before",
        {"pp": 1},
    ),
    "a pipeline without stages in DDP": (
        make_plan(2, L.fsdp2(pp=2)),
        make_plan(2, L.ddp()),
        "saved with pipeline stages, and this plan has no pipeline stages",
        "FSDP2 with pp=2, as before",
        None,
    ),
    "adamw to sgd": (
        make_plan(2, L.ddp()),
        make_plan(2, L.ddp(), optimizer="sgd"),
        "holds what optimizer='adamw' keeps, and this plan's is 'sgd'",
        "optimizer='adamw', as before",
        {"optimizer": "adamw"},
    ),
    "lion to adamw": (
        make_plan(2, L.fsdp2(), optimizer="lion"),
        make_plan(2, L.fsdp2()),
        "holds what optimizer='lion' keeps",
        "optimizer='lion', as before",
        {"optimizer": "lion"},
    ),
}


@pytest.fixture(autouse=True)
def everything_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the check of installed packages, so that only the checkpoint decides."""
    monkeypatch.setattr("shardscope.training.tasks.text_task.check_trained", lambda plan: None)


@pytest.mark.parametrize("case", LOADS)
def test_fault_31_a_checkpoint_that_the_engine_loads_is_accepted(case: str, tmp_path: Path) -> None:
    before, now = LOADS[case]
    task = Pretrain(resume=save_checkpoint(tmp_path, before))
    task.check(now)
    assert "checkpoint-tied-to-ranks" not in {
        finding.name for finding in now.findings(task) if now.layout.framework != "deepspeed"
    }


@pytest.mark.parametrize("case", REFUSED)
def test_fault_31_a_checkpoint_that_the_engine_cannot_load_raises(case: str, tmp_path: Path) -> None:
    before, now, why, fix, fields = REFUSED[case]
    path = save_checkpoint(tmp_path, before)
    task = Pretrain(resume=path)
    with pytest.raises(ValueError, match=r"^Pretrain\.resume is ") as refused:
        task.check(now)
    assert why in str(refused.value) and f"Nearest fix: {fix}" in str(refused.value)
    (danger,) = (found for found in now.findings(task) if found.severity == "danger" and why in found.why)
    if fields is None:
        assert danger.plan is None
        return
    assert danger.plan is not None
    values = {**vars(danger.plan.layout), **vars(danger.plan.recipe)}
    assert {name: values[name] for name in fields} == fields
    task.check(danger.plan)


@needs_installed("torch")
@needs_installed("accelerate")
def test_fault_31_a_resume_path_is_checked_before_ranks_start(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a", make_plan(2, L.zero(stage=2)), asked_name="a")
    with pytest.raises(ValueError, match=r"Pretrain\.resume is .*ZeRO stage 2.*Nearest fix: stage=2"):
        launch(make_plan(2, L.zero(stage=3)), Pretrain(resume=True), name="a", folder=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a"], "no run was made"
    others = Pretrain(resume=True)
    others.check_launch(make_plan(2, L.zero(stage=2)), tmp_path, "a")
    others.check_launch(make_plan(2, L.zero(stage=3)), tmp_path, "b")
    others.check_launch(make_plan(2, L.zero(stage=3)), tmp_path, None)
    others.check_launch(make_plan(2, L.zero(stage=3)), tmp_path / "nowhere", "a")


def test_fault_31_adapters_do_not_resume_over_a_base_of_another_seed(tmp_path: Path) -> None:
    """They would, without a word: a checkpoint of adapters has no base."""
    plan = make_plan(2, L.ddp(), method="lora")
    path = save_checkpoint(tmp_path, plan, seed=3, frozen_base=Pretrain(seed=3).frozen_base())
    Pretrain(resume=path, seed=3).check(plan)
    other = Pretrain(resume=path, seed=4)
    with pytest.raises(
        ValueError,
        match=r"base initialized from seed 3.* is initialized from seed 4.*Nearest fix: seed=3, as before",
    ):
        other.check(plan)
    (danger,) = (found for found in plan.findings(other) if found.name == "checkpoint-over-another-base")
    assert danger.task == Pretrain(resume=path, seed=3)
    # All weights are in a checkpoint of them: only the order of the text is another.
    whole = make_plan(2, L.ddp())
    path = save_checkpoint(tmp_path / "whole", whole, seed=3)
    other = Pretrain(resume=path, seed=4)
    other.check(whole)
    (warning,) = (found for found in whole.findings(other) if found.name == "checkpoint-of-another-seed")
    assert warning.severity == "warning" and warning.task == Pretrain(resume=path, seed=3)
    (words,) = check_loads(path, whole, "Pretrain.resume", seed=4, frozen_base=None)
    assert "read again" in words and words.endswith("Nearest fix: seed=3, as before.")
    assert check_loads(path, whole, "Pretrain.resume", seed=3, frozen_base=None) == []


def test_fault_31_adapters_do_not_resume_over_other_weights(tmp_path: Path) -> None:
    plan = make_plan(2, L.ddp(), method="lora")
    first, copy = write_folder(tmp_path / "first"), tmp_path / "copy"
    path = save_checkpoint(tmp_path / "run", plan, frozen_base=Finetune(weights=first).frozen_base())
    # Wherever the same weights lie, and in however many files.
    shutil.copytree(first, copy)
    for same in (copy, write_folder(tmp_path / "shards", shards=3)):
        base = Finetune(weights=same).frozen_base()
        assert check_loads(path, plan, "x", seed=0, frozen_base=base) == []
    for folder in (copy, first):
        file = folder / "model.safetensors"
        data = bytearray(file.read_bytes())
        # One norm, at the end of the file.
        data[-4:] = b"\x01" * 4
        file.write_bytes(data)
    for task, words in (
        (Finetune(weights=copy), f"Nearest fix: weights='{first}', as before"),
        (Finetune(weights=first), "Nearest fix: Put back the weights that were there before"),
        (Pretrain(), f"is initialized from seed 0.*Nearest fix: Finetune with weights='{first}', as before"),
    ):
        with pytest.raises(ValueError, match=rf"over a base of the weights in {first}, .*{words}"):
            check_loads(path, plan, "x", seed=0, frozen_base=task.frozen_base())
    path = save_checkpoint(tmp_path / "drawn", plan, frozen_base=Pretrain(seed=3).frozen_base())
    with pytest.raises(ValueError, match=r"Nearest fix: Pretrain with seed=3, as before"):
        check_loads(path, plan, "x", seed=3, frozen_base=Finetune(weights=first).frozen_base())


def test_fault_31_findings_read_no_base_without_adapters(tmp_path: Path) -> None:
    whole, adapted = make_plan(2, L.ddp()), make_plan(2, L.ddp(), method="lora")
    task = Finetune(weights=write_folder(tmp_path / "gone"), resume=save_checkpoint(tmp_path / "run", whole))
    over = {"frozen_base": {"seed": 1}}
    other = Finetune(weights=tmp_path / "gone", resume=save_checkpoint(tmp_path / "other", adapted, **over))
    shutil.rmtree(tmp_path / "gone")
    for plan, asked in ((whole, task), (adapted, other)):
        assert "checkpoint-over-another-base" not in {finding.name for finding in plan.findings(asked)}


# ---------------------------------------------------------------------------- functions of one's own


def own_loop(ctx: Any) -> None:
    ctx.engine.setup(lambda: None)


def own_names(context: Any, engine: Any = None) -> None:
    context.log(step=0, loss=0.0, engine=engine)


def engine_of_a_car(ctx: Any) -> None:
    class Car:
        engine = "steam"

    ctx.log(step=0, wheels=len(Car.engine))


class Trainer:
    engine = None

    def run(self, ctx: Any) -> None:
        ctx.log(step=0, loss=0.0 if self.engine is None else 1.0)

    def train(self, ctx: Any) -> None:
        engine = ctx.engine
        engine.setup(self.run)


def test_a_function_that_uses_ctx_engine_is_recognized() -> None:
    for task in (own_loop, Trainer().train, functools.partial(own_loop)):
        assert uses_engine(task)
    for other in (own_names, engine_of_a_car, Trainer().run, print, Pretrain(), None):
        assert not uses_engine(other)


@needs_installed("torch")
@needs_installed("accelerate")
@needs_installed("megatron")
def test_a_function_on_an_engine_that_does_not_train_the_plan_raises(tmp_path: Path) -> None:
    plan = make_plan(2, L.megatron(cp=2))
    fix = r"Nearest fix: layout=Layout\.fsdp2\(cp=2\)"
    with pytest.raises(ValueError, match=rf"^Layout\.cp is 2; allowed: 1 to train .*{fix}"):
        launch(plan, own_loop, name="late", folder=tmp_path)
    assert list(tmp_path.iterdir()) == [], "no run was made"


def train(context: Any) -> None:
    context.log(loss=1.0)


@needs_installed("torch")
@needs_installed("accelerate")
@pytest.mark.parametrize(
    ("variable", "text", "is_valid"),
    [
        *(("SHARDSCOPE_HANG_SECONDS", text, False) for text in ("-1", "0", "nan", "1h", "1e", " ")),
        *(("SHARDSCOPE_GRACE_SECONDS", text, False) for text in ("-1", "nan", "ten")),
        *(("SHARDSCOPE_HANG_SECONDS", text, True) for text in ("", "0.1", "inf", " 7 ", "1e3")),
        *(("SHARDSCOPE_GRACE_SECONDS", text, True) for text in ("", "0", "inf")),
    ],
)
def test_seconds_of_the_environment_that_nobody_could_read_raise(
    variable: str, text: str, is_valid: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, text)
    if is_valid:
        check_request(make_plan(1, L.ddp()), train, tmp_path, None)
        return
    with pytest.raises(ValueError, match=rf"variable {variable} is '{text}'; allowed: .*seconds.*unset"):
        launch(make_plan(1, L.ddp()), train, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("character", ["\N{ROCKET}", "\u8bad"])
def test_a_name_with_more_bytes_than_a_folder_may_have_raises(character: str, tmp_path: Path) -> None:
    name = character * (MAX_NAME_BYTES // len(character.encode()) + 1)
    with pytest.raises(FieldError, match=r"launch\.name is .*at most 240 bytes in UTF-8; these are") as error:
        launch(make_plan(1, L.ddp()), train, name=name, folder=tmp_path)
    assert error.value.fix == repr(name[:-1])
    assert check_name("launch.name", name[:-1]) == name[:-1] and list(tmp_path.iterdir()) == []


def test_a_deleted_working_directory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a notebook whose folder was replaced: libraries of the launcher fail to load there."""
    deleted = tmp_path / "deleted"
    deleted.mkdir()
    monkeypatch.chdir(deleted)
    deleted.rmdir()
    for call in (
        lambda: launch(make_plan(1, L.ddp()), train),
        lambda: launch(make_plan(1, L.ddp()), train, folder=tmp_path),
        runs,
        lambda: Run.attach("runs/mine"),
    ):
        with pytest.raises(FileNotFoundError, match=r"working directory of this process.*os\.chdir\(\)"):
            call()
    assert list(runs(tmp_path)) == [] and list(tmp_path.iterdir()) == []
