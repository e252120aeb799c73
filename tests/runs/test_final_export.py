"""The export at the end of a run on a full disk: the ranks keep the weights until they can be written."""

from __future__ import annotations

import errno
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from run_helpers import seconds_until
from tests.requirements import few, needs, thorough

import shardscope as ss
from shardscope import Layout
from shardscope.records.folder import RunFolder
from shardscope.records.json_files import append_line
from shardscope.runs.resume import resume_run, why_not_resumable

needs("torch")

pytestmark = pytest.mark.usefixtures("bounded_time", "nothing_left")

SPACE = "space"
"""File in the run folder with which its disk has room for weights."""
NO_SPACE = "No space left"


@dataclass(frozen=True, kw_only=True)
class ExportsOntoFullDisk(ss.Pretrain):
    """Finds no room for weights until the file :data:`SPACE` is there, and gives up after some time."""

    give_up_seconds: float = 600.0

    def __call__(self, ctx: Any) -> None:
        import safetensors.torch

        from shardscope.training.tasks import final_export

        save = safetensors.torch.save_file

        def save_if_space(tensors: Any, path: Any, **options: Any) -> None:
            if not (ctx.folder / SPACE).exists():
                Path(path).write_bytes(b"the beginning")
                text = f"I/O error: {os.strerror(errno.ENOSPC)} (os error {errno.ENOSPC})"
                raise safetensors.SafetensorError(text)
            save(tensors, path, **options)

        safetensors.torch.save_file = save_if_space
        final_export.RETRY_SECONDS, final_export.POLL_SECONDS = 0.2, 0.1
        final_export.GIVE_UP_SECONDS = self.give_up_seconds
        super().__call__(ctx)


def make_plan(layout: Any, recipe: dict[str, Any]) -> ss.Plan:
    return ss.Plan(
        ss.Architecture.of_size("2m"),
        ss.Cluster.parse("2xcpu"),
        ss.Recipe(seq_len=32, global_batch_size=2, precision="fp32", **recipe),
        layout,
    )


def launch(folder: Path, layout: Any, recipe: dict[str, Any], **fields: Any) -> ss.Run:
    plan = make_plan(layout, recipe)
    return ss.launch(plan, ExportsOntoFullDisk(num_steps=2, export=True, **fields), folder=folder)


CASES = {
    "fsdp2": (Layout.fsdp2(), {}),
    "ddp": (Layout.ddp(), {}),
    "fsdp2, stages": (Layout.fsdp2(pp=2), {}),
    "zero-3": (Layout.zero(stage=3), {}),
    "megatron": (Layout.megatron(tp=2), {}),
}


@pytest.mark.parametrize("case", few(list(CASES), ["fsdp2"]))
def test_fault_23_weights_are_exported_as_soon_as_there_is_space(case: str, tmp_path: Path) -> None:
    """The run failed, and the weights were lost."""
    layout, recipe = CASES[case]
    run = launch(tmp_path, layout, recipe)
    seconds_until(lambda: NO_SPACE in (run.reason or "") or run.status == "failed", 120)
    assert run.status == "running" and run.is_hanging and "free some space" in run.reason, run.error
    (run.folder / SPACE).touch()
    assert run.wait(60) == "finished", run.error
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(run.model)
    assert sum(weight.numel() for weight in model.parameters()) == run.plan.architecture.num_parameters
    assert not list(run.folder.glob(".*.partial"))


@pytest.mark.parametrize("has_checkpoint", few([True, False], [True]))
def test_fault_23_a_run_that_gives_up_says_what_is_kept(has_checkpoint: bool, tmp_path: Path) -> None:
    run = launch(tmp_path, Layout.ddp(), {}, save_checkpoint=has_checkpoint, give_up_seconds=0.4)
    assert run.wait(120) == "failed"
    assert not list(run.folder.glob(".*.partial")), "what was written is in the way of others"
    if not has_checkpoint:
        assert "Nothing is kept of 2 steps" in run.reason
        return
    assert "checkpoints/step-000002 is kept" in run.reason and f"resume={run.name!r}" in run.reason
    again = ss.launch(run.plan, ss.Pretrain(num_steps=2, export=True, resume=run.folder), folder=tmp_path)
    assert again.wait(120) == "finished" and again.model is not None, again.error


@thorough()
def test_fault_23_a_run_that_has_only_to_export_is_resumed(tmp_path: Path) -> None:
    """All of its steps are done, which was the reason to refuse."""
    options: dict[str, Any] = {"num_steps": 2, "export": True, "save_checkpoint": True}
    run = ss.launch(make_plan(Layout.ddp(), {}), ss.Pretrain(**options), folder=tmp_path)
    assert run.wait(120) == "finished"
    assert "has finished" in str(why_not_resumable(run))
    # As if the export had failed.
    shutil.rmtree(run.model)
    RunFolder(run.folder).set_status("failed", "the trained weights cannot be exported")
    resumed = resume_run(ss.Run.attach(run.folder))
    assert resumed.wait(120) == "finished" and resumed.model is not None, resumed.error


def test_save_and_stop_waits_for_the_weights(tmp_path: Path) -> None:
    """Nothing else has them: the run failed at once, and they were lost."""
    run = launch(tmp_path, Layout.ddp(), {})
    seconds_until(lambda: NO_SPACE in (run.reason or ""), 120)
    run.stop(checkpoint=True)
    seconds_until(lambda: "ten minutes" in run.reason, 30)
    assert run.status == "stopping" and "free some space" in run.reason
    # The notebook is closed next: its kernel's watcher requests a stop as well, which changes nothing.
    append_line(RunFolder(run.folder).control, {"command": "stop", "time": 0.0, "kernel_ended": True})
    time.sleep(1)
    (run.folder / SPACE).touch()
    assert run.wait(60) in ("finished", "stopped"), run.error
    assert run.model is not None and NO_SPACE not in run.reason
    assert "| steps | 2 of 2 |" in (run.model / "README.md").read_text()


@thorough()
def test_save_and_stop_ends_the_waiting_if_a_checkpoint_has_the_weights(tmp_path: Path) -> None:
    run = launch(tmp_path, Layout.ddp(), {}, save_checkpoint=True)
    seconds_until(lambda: NO_SPACE in (run.reason or ""), 120)
    run.stop(checkpoint=True)
    assert run.wait(30) == "stopped", run.error
    assert "checkpoints/step-000002 is kept" in run.reason and f"resume={run.name!r}" in run.reason
