"""``launch(retries=)`` on this machine: a failed run is started again, from its last checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.requirements import needs, thorough

import shardscope as ss

needs("accelerate")

STEPS = 6


@dataclass(frozen=True, kw_only=True)
class FailingPretrain(ss.Pretrain):
    """A Pretrain of which a rank fails at one step, ``failures`` times."""

    failures: int = 1
    changes_text: bool = False
    """Whether the text is another one after a failure."""

    def read_text(self, ctx: object) -> object:
        windows = super().read_text(ctx)
        build_batch = windows.build_batch

        def build_or_fail(step: int) -> object:
            marks = list(ctx.folder.glob("failed-*"))
            if (ctx.rank, step) == (1, 4) and len(marks) < self.failures:
                (ctx.folder / f"failed-{len(marks)}").touch()
                if self.changes_text:
                    self.text.write_text("Some years ago, never mind how long. " * 500)
                raise ValueError("this rank fails")
            return build_batch(step)

        object.__setattr__(windows, "build_batch", build_or_fail)
        return windows


def make_plan() -> ss.Plan:
    recipe = ss.Recipe(seq_len=32, micro_batch_size=1, global_batch_size=2, precision="fp32")
    return ss.Plan(ss.Architecture.of_size("2m"), ss.Cluster.parse("2xcpu"), recipe, ss.Layout.ddp())


def test_a_failed_run_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    task = FailingPretrain(num_steps=STEPS, save_every=2)
    run = ss.launch(make_plan(), task, folder=tmp_path, name="retried", retries=1)
    assert run.wait(300) == "finished", (run.reason, run.error)
    first, second = run.attempts
    assert first["status"] == "failed" and first["rank"] == 1 and "this rank fails" in first["error"]
    assert second["from_step"] >= 2 and second["status"] == "finished"
    assert not (run.folder / "task.pkl").exists()
    whole = ss.launch(make_plan(), ss.Pretrain(num_steps=STEPS), folder=tmp_path, name="whole")
    assert whole.wait(300) == "finished"
    curves = [[record["loss"] for record in each.metrics() if record["rank"] == 0] for each in (run, whole)]
    assert curves[0] == pytest.approx(curves[1], abs=1e-5)


@thorough()
def test_changed_data_are_named_in_the_next_attempt(tmp_path: Path) -> None:
    """The attempts share a folder: the second one wrote its record over that of the first one's data."""
    text = tmp_path / "text.txt"
    text.write_text("Call me Ishmael. " * 500)
    task = FailingPretrain(num_steps=STEPS, save_every=2, text=text, changes_text=True)
    run = ss.launch(make_plan(), task, folder=tmp_path, retries=1)
    assert run.wait(300) == "finished", (run.reason, run.error)
    assert run.logs(0).count("text.txt has changed (SHA-256 ") == 1


@thorough()
def test_retries_are_used_up(tmp_path: Path) -> None:
    task = FailingPretrain(num_steps=STEPS, failures=5)
    run = ss.launch(make_plan(), task, folder=tmp_path, retries=1)
    assert run.wait(300) == "failed"
    assert "all 1 retries are used up" in run.reason and "this rank fails" in run.error
    assert [attempt["status"] for attempt in run.attempts] == ["failed", "failed"]
    steps = [record["step"] for record in run.metrics() if record["rank"] == 0]
    assert steps == sorted(set(steps))


SIGNAL_BETWEEN_ATTEMPTS = """
import os, signal, sys
if "shardscope.runs.launch.supervisor" in sys.orig_argv:
    from shardscope.runs.launch.supervision.run_end import RunEnd
    finish = RunEnd.finish
    def finish_with_signal(self, status):
        finish(self, status)
        if status == "starting":
            os.kill(os.getpid(), signal.SIGTERM)
    RunEnd.finish = finish_with_signal
"""


def fails_once(ctx: Any) -> None:
    mark = ctx.folder / "failed"
    if not mark.exists():
        mark.touch()
        raise ValueError("the first attempt fails")


def test_a_signal_between_two_attempts_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first attempt is over, and the second may only start when the trackers have finished."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SIGNAL_BETWEEN_ATTEMPTS)
    monkeypatch.setenv("PYTHONPATH", str(site))
    recipe = ss.Recipe(seq_len=32, micro_batch_size=1, global_batch_size=1, precision="fp32")
    plan = ss.Plan(ss.Architecture.of_size("2m"), ss.Cluster.parse("1xcpu"), recipe, ss.Layout.ddp())
    run = ss.launch(plan, fails_once, folder=tmp_path, retries=1)
    assert run.wait(60) == "stopped" and run.reason == "the supervisor got SIGTERM"
    assert [attempt["status"] for attempt in run.attempts] == ["failed", "stopped"]
    assert [record["status"] for record in run.history][-3:] == ["starting", "stopping", "stopped"]
