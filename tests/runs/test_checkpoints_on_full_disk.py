"""Checkpoints that the disk does not take: the run goes on without them, and keeps its weights."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from finetuned_models import small_model
from run_helpers import seconds_until
from test_finetune_examples import ROWS, SEQ_LEN
from test_validation import VALIDATION_ROWS, evaluate, list_values
from tests.requirements import few, needs, thorough

import shardscope as ss
from shardscope import Layout

needs("torch")

pytestmark = pytest.mark.usefixtures("bounded_time", "nothing_left")

SPACE = "space"
"""File in the run folder with which its disk has room for all checkpoints."""
NO_SPACE = "No space left"
OTHER_NODE = "other-node"
"""Folder of rank 1, where it has a disk of its own."""


def fill_disk(folder: Path, fits: int, name: str = "") -> None:
    """Let rank 0 complete no checkpoint after more than ``fits`` steps: the others do not see the error.

    ``name``: only those whose name contains it.
    """
    from shardscope.frameworks.deepspeed.engine import checkpointing as deepspeed
    from shardscope.frameworks.megatron.engine import checkpointing as megatron
    from shardscope.training.checkpoints import checkpoint

    for module in (checkpoint, deepspeed, megatron):
        untyped: Any = module
        write = untyped.write_position

        def write_if_space(path: Path, position: Any, *more: Any, write: Any = write) -> None:
            does_not_fit = position["num_steps_done"] > fits and name in path.name
            if does_not_fit and not (folder / SPACE).exists():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write(path, position, *more)

        untyped.write_position = write_if_space


@dataclass(frozen=True, kw_only=True)
class SavesOntoFullDisk(ss.Pretrain):
    def __call__(self, ctx: Any) -> None:
        from shardscope.training.tasks import final_export

        final_export.RETRY_SECONDS, final_export.POLL_SECONDS = 0.2, 0.1
        fill_disk(ctx.folder, fits=1)
        super().__call__(ctx)


@dataclass(frozen=True, kw_only=True)
class FinetunesOntoFullDisk(ss.Finetune):
    fits: int = 1
    name: str = ""
    shares_no_folder: bool = False
    """Its ranks are told what those of Ray's nodes without a shared folder are."""

    def __call__(self, ctx: Any) -> None:
        if self.shares_no_folder:
            os.environ["SHARDSCOPE_OWN_FOLDER"] = "1"
        fill_disk(ctx.folder, self.fits, self.name)
        super().__call__(ctx)


@dataclass(frozen=True, kw_only=True)
class SavesOnTwoDisks(ss.Pretrain):
    """Its ranks are told what those of two of Ray's nodes without a shared folder are; one has no space."""

    fails_to_rename: bool = False
    """Rank 1 has space for its files, but not for the name of the complete folder. Else rank 0 has none."""

    def __call__(self, ctx: Any) -> None:
        os.environ |= {"SHARDSCOPE_OWN_FOLDER": "1", "LOCAL_RANK": "0"}
        if not self.fails_to_rename:
            fill_disk(ctx.folder, fits=0, name="step-000003")
        if ctx.rank == 1:
            untyped: Any = type(ctx)
            untyped.folder = ctx.folder / OTHER_NODE
            if self.fails_to_rename:
                self.refuse_renames("step-000003")
        super().__call__(ctx)

    def refuse_renames(self, name: str) -> None:
        untyped: Any = Path
        rename = Path.rename

        def rename_others(path: Path, target: Path) -> Path:
            if target.name == name:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return rename(path, target)

        untyped.rename = rename_others


@dataclass(frozen=True, kw_only=True)
class WritesSmallFiles(ss.Pretrain):
    """Its ranks and their writers can write no larger file, which they report as they do a full disk."""

    max_file_bytes: int

    def __call__(self, ctx: Any) -> None:
        import resource

        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.max_file_bytes, hard))
        super().__call__(ctx)


@dataclass(frozen=True, kw_only=True)
class WritesNoMetadata(ss.Pretrain):
    """Its rank 0 cannot write one of megatron-core's own files, for which the others wait."""

    name: str

    def __call__(self, ctx: Any) -> None:
        from megatron.core.dist_checkpointing import serialization
        from megatron.core.dist_checkpointing.strategies import common
        from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

        def find_no_space(*_: Any) -> None:
            if ctx.rank == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        writers: dict[str, Any] = {
            "finish": FileSystemWriterAsync,
            "save_config": serialization,
            "save_common": getattr(common, "TorchCommonSaveStrategy", serialization),
        }
        setattr(writers[self.name], self.name, find_no_space)
        super().__call__(ctx)


def launch(folder: Path, layout: Any, kind: type[ss.Pretrain] = SavesOntoFullDisk, **fields: Any) -> ss.Run:
    recipe = ss.Recipe(seq_len=32, global_batch_size=2, precision="fp32")
    plan = ss.Plan(ss.Architecture.of_size("2m"), ss.Cluster.parse("2xcpu"), recipe, layout)
    return ss.launch(plan, kind(**fields), folder=folder)


def list_checkpoints(run: ss.Run) -> list[str]:
    return sorted(path.name for path in (run.folder / "checkpoints").iterdir())


CASES = {
    "fsdp2": Layout.fsdp2(),
    "ddp": Layout.ddp(),
    "zero-3": Layout.zero(stage=3),
    "megatron": Layout.megatron(tp=2),
}


@pytest.mark.parametrize("case", few(list(CASES), ["fsdp2"]))
def test_fault_23_a_run_goes_on_without_checkpoints_and_exports(case: str, tmp_path: Path) -> None:
    """It failed, and the weights were lost."""
    run = launch(tmp_path, CASES[case], num_steps=4, save_every=1, export=True)
    assert run.wait(120) == "finished", run.error
    assert run.model is not None
    assert list_checkpoints(run) == ["step-000001"]
    assert "step-000004 could not be saved: No space left" in run.reason and "free some space" in run.reason
    assert "step-000001 is kept" in run.reason


@pytest.mark.parametrize(
    ("case", "max_file_bytes"),
    few([("zero-3", 36_000), ("megatron", 1_000_000)], [("megatron", 1_000_000)]),
)
def test_fault_23_files_that_cannot_be_written_end_no_run(
    case: str, max_file_bytes: int, tmp_path: Path
) -> None:
    """With megatron-core's writers it failed. It hung if DeepSpeed's scripts, rank 0's alone, did not fit."""
    fields = {"num_steps": 100_000, "save_every": 2, "max_file_bytes": max_file_bytes}
    run = launch(tmp_path, CASES[case], WritesSmallFiles, **fields)
    # torch does not say that the file is too large. The supervisor reports what a rank noted a second ago.
    seconds_until(
        lambda: (len(run.metrics()) > 20 and "could not be saved: " in run.reason) or run.status == "failed",
        150,
    )
    assert run.status == "running", (run.status, run.reason)
    run.stop()
    assert run.wait(30) == "stopped" and len(run.metrics()) > 20


def test_fault_23_the_error_of_a_writer_of_megatron_core_is_that_of_the_disk() -> None:
    """The run ended with "CheckpointException ranks:dict_keys([])", as rank 1 has no cause of it."""
    from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

    from shardscope.training.checkpoints.temporary_folder import as_os_error

    failure = RuntimeError(f"Worker failure: {OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))}")
    error = as_os_error(CheckpointException("write", {1: _wrap_exception(failure)}))
    assert error is not None and error.errno == errno.ENOSPC


@pytest.mark.parametrize("name", few(["finish", "save_config", "save_common"], ["finish"]))
def test_fault_23_metadata_of_megatron_core_that_cannot_be_written_end_no_run(
    name: str, tmp_path: Path
) -> None:
    """Rank 0 had the error alone, and the run failed."""
    run = launch(
        tmp_path, CASES["megatron"], WritesNoMetadata, num_steps=4, save_every=2, export=True, name=name
    )
    assert run.wait(150) == "finished", run.error
    assert run.model is not None and not list_checkpoints(run)
    assert f"step-000004 could not be saved: {NO_SPACE}" in run.reason


@thorough()
def test_fault_23_checkpoints_are_saved_again_when_there_is_space(tmp_path: Path) -> None:
    run = launch(tmp_path, Layout.fsdp2(), num_steps=100_000, save_every=2, log_every=1000)
    seconds_until(lambda: "could not be saved" in run.reason or run.status == "failed", 120)
    (run.folder / SPACE).touch()
    seconds_until(lambda: "saved again" in run.reason or run.status == "failed", 60)
    run.stop()
    assert run.wait(60) == "stopped" and "could not be saved" not in run.reason
    assert len([name for name in list_checkpoints(run) if name.startswith("step-")]) > 1


@thorough()
@pytest.mark.parametrize("is_stopped", [False, True])
def test_fault_23_the_last_checkpoint_waits_for_space(is_stopped: bool, tmp_path: Path) -> None:
    """Nothing else has the weights."""
    num_steps = 100_000 if is_stopped else 3
    run = launch(tmp_path, Layout.fsdp2(), num_steps=num_steps, save_checkpoint=True, export=is_stopped)
    if is_stopped:
        seconds_until(lambda: len(run.metrics()) > 4 or run.status == "failed")
        run.stop(checkpoint=True)
    seconds_until(lambda: NO_SPACE in run.reason or run.status == "failed", 120)
    assert run.status in ("running", "stopping") and "free some space" in run.reason
    run.stop(checkpoint=True)  # Which is what the ranks try to do.
    seconds_until(lambda: run.status == "stopping")
    (run.folder / SPACE).touch()
    assert run.wait(60) in ("stopped", "finished"), run.error
    assert len(list_checkpoints(run)) == 1 and NO_SPACE not in run.reason


@pytest.mark.parametrize("fails_to_rename", [False, True])
@pytest.mark.parametrize("case", few(["fsdp2", "zero-3", "megatron"], ["fsdp2"]))
def test_fault_23_all_nodes_keep_the_same_checkpoints(
    case: str, fails_to_rename: bool, tmp_path: Path
) -> None:
    """The other node kept its part of the one that the first had no space for, and deleted another one."""
    fields = {"num_steps": 4, "save_every": 1, "keep_last": 2, "fails_to_rename": fails_to_rename}
    run = launch(tmp_path, CASES[case], SavesOnTwoDisks, **fields)
    assert run.wait(120) == "finished", run.error
    names = list_checkpoints(run)
    assert names == ["step-000002", "step-000004"]
    assert sorted(path.name for path in (run.folder / OTHER_NODE / "checkpoints").iterdir()) == names


@thorough()
def test_fault_23_a_stop_ends_the_waiting_of_one_with_a_checkpoint(tmp_path: Path) -> None:
    run = launch(tmp_path, Layout.fsdp2(), num_steps=100_000)
    seconds_until(lambda: len(run.metrics()) > 4 or run.status == "failed")
    run.stop(checkpoint=True)
    seconds_until(lambda: NO_SPACE in run.reason or run.status == "failed", 60)
    run.stop()
    assert run.wait(30) == "stopped"


def saves_without_space(ctx: Any) -> None:
    """A function's own checkpoint, of which rank 1 cannot write its part."""
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    def find_no_space(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if ctx.rank == 1:
        untyped: Any = FileSystemWriter
        untyped.write_data = find_no_space
    ctx.engine.setup(lambda: torch.nn.Linear(8, 8))
    ctx.engine.save("checkpoints/mine")


@thorough()
def test_fault_23_the_reason_of_a_failed_save_begins_with_its_cause(tmp_path: Path) -> None:
    """It was "CheckpointException ranks:dict_keys([1])"."""
    recipe = ss.Recipe(seq_len=32, global_batch_size=2, precision="fp32")
    plan = ss.Plan(ss.Architecture.of_size("2m"), ss.Cluster.parse("2xcpu"), recipe, Layout.ddp())
    run = ss.launch(plan, saves_without_space, folder=tmp_path)
    assert run.wait(60) == "failed"
    assert NO_SPACE in run.reason and "free some space" in run.reason


def finetune_onto_full_disk(tmp_path: Path, **options: Any) -> tuple[ss.Run, list[float]]:
    """Return a run with early stopping, and its validation losses after each of four steps."""
    needs("datasets")
    folder = small_model(tmp_path, "llama")
    recipe = ss.Recipe(seq_len=SEQ_LEN, micro_batch_size=1, global_batch_size=4, precision="fp32")
    plan = ss.Plan(ss.Architecture.from_hf(folder), ss.Cluster.parse("2xcpu"), recipe, Layout.ddp())
    options |= {"validate_every": 1, "early_stopping": 3, "learning_rate": 0.03, "warmup": 0}
    options |= {"validation": VALIDATION_ROWS, "export": True}
    run = ss.launch(plan, FinetunesOntoFullDisk(folder, ROWS, num_steps=4, **options), folder=tmp_path)
    assert run.wait(120) == "finished", run.error
    return run, list_values(run, "validation_loss")[1:]


@thorough()
def test_fault_23_the_best_weights_left_are_exported(tmp_path: Path) -> None:
    """Early stopping on a full disk: the first of four validations is on disk, and the second is the best."""
    run, losses = finetune_onto_full_disk(tmp_path)
    assert losses[1] == min(losses) and len(losses) == 4
    assert evaluate(run.model) == pytest.approx(min(losses[0], losses[3]), abs=1e-3)
    assert "checkpoints/best could not be saved" in run.reason


@thorough()
def test_fault_23_best_weights_that_are_exported_are_not_replaced_by_worse_ones(tmp_path: Path) -> None:
    """The disk has space for weights, but not for a checkpoint, which has the optimizer's state too."""
    run, losses = finetune_onto_full_disk(tmp_path, fits=0, shares_no_folder=True)
    assert min(losses) < losses[-1] - 1e-2
    assert evaluate(run.model) == pytest.approx(min(losses), abs=1e-3)


@thorough()
def test_fault_23_checkpoints_name_the_best_one_that_was_saved(tmp_path: Path) -> None:
    """A resumed run looked for the one that was not, and had no best weights."""
    run, losses = finetune_onto_full_disk(tmp_path, name="best", save_every=1, keep_last=None)
    assert losses[1] < losses[0]
    for step in (2, 3):
        state = json.loads((run.folder / f"checkpoints/step-{step:06d}/position.json").read_text())
        assert state["validation"]["best_loss"] == losses[0]
