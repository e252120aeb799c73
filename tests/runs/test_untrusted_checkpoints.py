"""Checkpoints that a stranger made or changed: resume=True does not take them, and no pickle in them runs."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.requirements import few, needs, sample, skip_without, thorough

torch = needs("torch")
needs("transformers")

from gloo_ranks import StandInContext, on_ranks, tiny_plan  # noqa: E402

from shardscope.runs.launch.launch import launch  # noqa: E402
from shardscope.runs.resume import resume_run, why_not_resumable  # noqa: E402
from shardscope.runs.run import Run  # noqa: E402
from shardscope.training.checkpoints.folders import checkpoint_path  # noqa: E402
from shardscope.training.checkpoints.manifest import MANIFEST_FILE  # noqa: E402
from shardscope.training.tasks.pretrain import Pretrain  # noqa: E402

pytestmark = pytest.mark.usefixtures("bounded_time", "nothing_left")


class Evil:
    """A pickle of it runs a shell command when it is loaded."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self.proof}'",)


def copy_as_newer(run: Path, name: str) -> Path:
    """Copy a run as if it had been launched later, under the same name."""
    copied = shutil.copytree(run, run.with_name(name))
    record = json.loads((copied / "run.json").read_text())
    record["created"] += 3600.0
    (copied / "run.json").write_text(json.dumps(record))
    return copied


@thorough()
def test_fault_50_a_copied_run_with_malicious_metadata_is_not_resumed(tmp_path: Path) -> None:
    plan, proof = tiny_plan("fsdp2", 1), tmp_path / "proof"
    runs = tmp_path / "runs"
    first = launch(plan, Pretrain(num_steps=2, save_checkpoint=True), name="exp", folder=runs)
    assert first.wait() == "finished", first.error
    copied = copy_as_newer(first.folder, "exp-copied")
    evil = checkpoint_path(copied, 2)
    # As long as the saved file: a shorter one would count as cut off, which is another reason not to use it.
    metadata = evil / ".metadata"
    saved_bytes = metadata.stat().st_size
    metadata.write_bytes(pickle.dumps(Evil(proof)).ljust(saved_bytes, b"\0"))

    task = Pretrain(num_steps=4, resume=True)
    with pytest.warns(RuntimeWarning, match=r"not used: .*exp-copied.*\.metadata was changed"):
        second = launch(plan, task, name="exp", folder=runs)
    assert second.wait() == "finished", second.error
    log = second.logs(0)
    assert f"resumed from {checkpoint_path(first.folder, 2)}: 2 steps done" in log
    assert f"not used: {evil}" in log

    # Without a checkpoint of the user's own none is taken, and no run starts anew without a word.
    shutil.rmtree(first.folder)
    shutil.rmtree(second.folder)
    with pytest.raises(ValueError, match=r"Pretrain\.resume is True; allowed: .*exp-copied") as refused:
        launch(plan, task, name="exp", folder=runs)
    assert f"resume={str(evil)!r}" in str(refused.value) and "another machine" in str(refused.value)

    # Named by its path it is opened, with care, unless its manifest shows that a file was cut off.
    os.truncate(metadata, saved_bytes - 1)
    with pytest.raises(ValueError, match=r"\.metadata has"):
        launch(plan, Pretrain(num_steps=4, resume=evil), name="named", folder=runs)
    os.truncate(metadata, saved_bytes)
    named = launch(plan, Pretrain(num_steps=4, resume=evil), name="named", folder=runs)
    assert named.wait() == "failed"
    assert ".metadata" in str(named.error) and "posix.system" in str(named.error)

    # Resume in the list of runs names what it does not take.
    status = [{"time": 1.0, "status": "failed", "reason": "as it says"}]
    (copied / "status.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in status))
    stranger = Run.attach(copied)
    assert "Your own launches on this machine saved no checkpoint of it" in str(why_not_resumable(stranger))
    with pytest.raises(ValueError, match="was changed after it was saved"):
        resume_run(stranger)
    assert not proof.exists()


# ---------------------------------------------------------------------------- files of every format


def replace_metadata(checkpoint: Path, proof: Path) -> str:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Evil(proof)))
    return ".metadata"


def replace_item(checkpoint: Path, proof: Path) -> str:
    """Put an evil pickle where an optimizer's setting lies in a file of tensors."""
    with (checkpoint / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    held = io.BytesIO()
    torch.save(Evil(proof), held)
    info = next(
        info
        for index, info in metadata.storage_data.items()
        if index.fqn == "optimizer.param_groups.0.weight_decay"
        or type(metadata.state_dict_metadata[index.fqn]).__name__ == "BytesStorageMetadata"
    )
    file_name = info.relative_path
    info.offset, info.length = (checkpoint / file_name).stat().st_size, held.tell()
    with (checkpoint / file_name).open("ab") as tensors:
        tensors.write(held.getvalue())
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    return str(file_name)


def replace_file(pattern: str) -> Callable[[Path, Path], str]:
    def replace(checkpoint: Path, proof: Path) -> str:
        for path in checkpoint.glob(pattern):
            torch.save({"module": Evil(proof)}, path)
        return pattern.rpartition("*")[2] or pattern

    return replace


FORMATS: dict[str, tuple[str, dict[str, Any], list[Callable[[Path, Path], str]]]] = {
    "ddp": ("ddp", {}, [replace_metadata]),
    "fsdp2": ("fsdp2", {}, [replace_metadata, replace_item]),
    "ZeRO-0": ("zero", {"stage": 0}, [replace_file("zero/mp_*_model_states.pt")]),
    "ZeRO-2": ("zero", {"stage": 2}, [replace_file("zero/mp_*_model_states.pt")]),
    "ZeRO-3": ("zero", {"stage": 3}, [replace_file("zero/*_optim_states.pt")]),
    "Megatron": ("megatron", {"tp": 2}, [replace_file("common.pt"), replace_metadata, replace_item]),
}
NEEDED = {"zero": "deepspeed", "megatron": "megatron"}


def loaded_as_a_stranger(ctx: StandInContext, framework: str, attacks: list[Any]) -> list[Any]:
    """Save, load without the manifest, and load again after each attack."""
    import torch.distributed as dist

    from shardscope.frameworks.engines import get_engine_class
    from shardscope.training.model.model import build_model

    def new_engine() -> Any:
        engine = get_engine_class(ctx.plan)(ctx)
        engine.setup(lambda: build_model(ctx.plan.architecture))
        return engine

    tokens = torch.arange(128).reshape(2, 64) % 50
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    engine = new_engine()
    engine.step(batch)
    engine.save("one")
    expected = engine.step(batch)
    if ctx.rank == 0:
        (ctx.folder / "one" / MANIFEST_FILE).unlink()
    dist.barrier()
    engine = new_engine()
    engine.load("one")
    results: list[Any] = [[expected, engine.step(batch)]]
    for number, attack in enumerate(attacks):
        name = f"evil-{number}"
        if ctx.rank == 0:
            shutil.copytree(ctx.folder / "one", ctx.folder / name)
            (ctx.folder / f"{name}.file").write_text(attack(ctx.folder / name, ctx.folder / "proof"))
        dist.barrier()
        with pytest.raises(ValueError) as refused:
            engine.load(name)
        results.append([(ctx.folder / f"{name}.file").read_text(), str(refused.value)])
        dist.barrier()
    return results


@sample(2)
@pytest.mark.parametrize("name", few(FORMATS, [name for name in FORMATS if name != "Megatron"]))
def test_fault_50_no_pickle_of_an_untrusted_checkpoint_runs(name: str, tmp_path: Path) -> None:
    framework, layout, attacks = FORMATS[name]
    skip_without(NEEDED.get(framework, "torch"))
    plan = tiny_plan(framework, 2, layout=layout)
    for results in on_ranks(2, plan, lambda ctx: loaded_as_a_stranger(ctx, framework, attacks), tmp_path):
        (expected, loss), *refusals = results
        assert loss == pytest.approx(expected, abs=1e-6), "what its own framework saved loads by the list"
        for file, words in refusals:
            assert file in words and "posix.system" in words and "Nearest fix" in words
    assert not (tmp_path / "proof").exists()


# ---------------------------------------------------------------------------- classes of the user's own


class Note:
    """A setting of the user's own optimizer."""


def with_a_note(ctx: StandInContext) -> str:
    from shardscope.frameworks.engines import get_engine_class
    from shardscope.training.model.model import build_model

    def build_optimizer(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(parameters, lr=1e-3)
        optimizer.param_groups[0]["note"] = Note()
        return optimizer

    tokens = torch.arange(128).reshape(2, 64) % 50
    engine = get_engine_class(ctx.plan)(ctx)
    engine.setup(lambda: build_model(ctx.plan.architecture), build_optimizer)
    engine.step({"input_ids": tokens, "labels": tokens.clone()})
    engine.save("one")
    engine.load("one")
    (ctx.folder / "one" / MANIFEST_FILE).unlink()
    with pytest.raises(ValueError) as refused:
        engine.load("one")
    return str(refused.value)


def test_fault_50_custom_classes_load_from_this_users_checkpoints(tmp_path: Path) -> None:
    (words,) = on_ranks(1, tiny_plan("fsdp2", 1), with_a_note, tmp_path)
    assert f"refers to {Note.__module__}.Note" in words and "checkpoint.key" in words
