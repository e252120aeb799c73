"""The order of a launch on any backend, and what a failure at each step leaves: nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.requirements import needs_installed

import shardscope as ss
from shardscope.records.folder import RunFolder, Status
from shardscope.runs.backends import slurm_backend
from shardscope.runs.launch import launch as launch_module

PLAN = ss.Plan(
    ss.Architecture.of_size("2m"), ss.Cluster.parse("1xcpu"), ss.Recipe(seq_len=64), ss.Layout.ddp()
)
STEPS = ("check", "describe", "describe_first_status", "start", "close")


class FailingBackend:
    """A backend that raises in one step and notes the calls."""

    subfolders = ("extra",)

    def __init__(self, step: str, error: BaseException) -> None:
        self.step, self.error, self.calls = step, error, []  # type: ignore[var-annotated]

    def _call(self, step: str) -> None:
        self.calls.append(step)
        if step == self.step and self.calls.count(step) == 1:
            raise self.error

    def check(self, *_: object) -> str:
        self._call("check")
        return ""

    def describe(self, *_: object) -> dict[str, object]:
        self._call("describe")
        return {}

    def describe_first_status(self) -> tuple[Status, str]:
        self._call("describe_first_status")
        return "queued", "a test"

    def start(self, folder: RunFolder, plan: ss.Plan, description: Mapping[str, object]) -> None:
        assert (folder.path / "extra").is_dir() and folder.run_json.exists()
        self._call("start")

    def close(self) -> None:
        self._call("close")

    def undo(self) -> None:
        self._call("undo")


@needs_installed("torch")
@pytest.mark.parametrize("error", [OSError("no answer"), KeyboardInterrupt(), MemoryError()], ids=repr)
@pytest.mark.parametrize("step", STEPS)
def test_a_launch_that_fails_at_any_step_is_undone(
    step: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = FailingBackend(step, error)
    monkeypatch.setattr(launch_module, "_create_backend", lambda *_: backend)
    with pytest.raises(type(error)):
        ss.launch(PLAN, ss.Pretrain(num_steps=1), folder=tmp_path / "new" / "runs", name="run")
    assert not (tmp_path / "new").exists()
    assert backend.calls[-1] == "close", "nothing that the checks have opened stays open"
    if step in ("start", "close"):
        assert "undo" in backend.calls


def test_a_job_is_not_submitted_without_its_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a run shall end with the kernel, and its watcher cannot be started."""
    submitted: list[Any] = []

    def refuse(_: RunFolder) -> None:
        raise OSError("no thread can be started")

    monkeypatch.setattr(slurm_backend, "KernelWatch", refuse)
    monkeypatch.setattr(slurm_backend, "submit", lambda *_, **__: submitted.append(1))
    backend = slurm_backend.SlurmBackend(object(), outlives=False, force=False)  # type: ignore[arg-type]
    with pytest.raises(OSError, match="no thread"):
        backend.start(RunFolder(tmp_path), PLAN, {})
    backend.undo()
    assert not submitted
