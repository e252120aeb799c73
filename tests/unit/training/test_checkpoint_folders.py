"""Tests of checkpoint folders, without torch: which are complete, kept and resumed from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.saved_checkpoints import write_checkpoint

from shardscope import Cluster, Layout, Plan, Pretrain, Recipe, models
from shardscope.training.checkpoints.choice import choose_for_rank, find_newest_checkpoint
from shardscope.training.checkpoints.folders import (
    checkpoint_path,
    delete_older,
    delete_unfinished,
    list_checkpoints,
)


def make_checkpoint(run: Path, steps: int, *, whole: bool = True) -> Path:
    path = checkpoint_path(run, steps)
    if whole:
        return write_checkpoint(path, {"num_steps_done": steps})
    path.mkdir(parents=True)
    return path


def run_folder(parent: Path, name: str, asked: str | None, created: float, plan: Plan | None = None) -> Path:
    folder = parent / name
    folder.mkdir()
    described = {"plan": json.loads(plan.to_json())} if plan else {}
    (folder / "run.json").write_text(json.dumps({"asked_name": asked, "created": created, **described}))
    return folder


def test_fault_30_only_complete_checkpoints_count(tmp_path: Path) -> None:
    assert find_newest_checkpoint(tmp_path) is None
    for steps in (900, 1_000_000, 10):
        make_checkpoint(tmp_path, steps)
    make_checkpoint(tmp_path, 2_000_000, whole=False)
    for other in ("step-abc", ".step-3000000.partial", ".step-3000001.old"):
        (tmp_path / "checkpoints" / other).mkdir()
        (tmp_path / "checkpoints" / other / "position.json").write_text("{}")
    names = [path.name for path in list_checkpoints(tmp_path)]
    assert names == ["step-000010", "step-000900", "step-1000000"]
    assert find_newest_checkpoint(tmp_path) == checkpoint_path(tmp_path, 1_000_000)


def test_a_run_resumes_from_its_best_checkpoint_unless_it_has_a_later_one(tmp_path: Path) -> None:
    """A run that was killed, and had saved no other one, could not be resumed."""
    best = write_checkpoint(tmp_path / "checkpoints" / "best", {"num_steps_done": 20})
    assert find_newest_checkpoint(tmp_path) == best
    make_checkpoint(tmp_path, 10)
    assert find_newest_checkpoint(tmp_path) == best
    same = make_checkpoint(tmp_path, 20)
    assert find_newest_checkpoint(tmp_path) == same
    (best / "position.json").write_text("{")
    assert find_newest_checkpoint(tmp_path) == same
    delete_older(tmp_path, 1)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"best", "step-000020"}


def test_the_latest_checkpoints_are_kept(tmp_path: Path) -> None:
    for steps in (10, 20, 30):
        make_checkpoint(tmp_path, steps)
    half = make_checkpoint(tmp_path, 40, whole=False)
    delete_older(tmp_path, 2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        *("step-000020", "step-000030", "step-000040")
    ]
    assert half.is_dir(), "what is being written is no older checkpoint"
    delete_older(tmp_path, 5)
    assert len(list_checkpoints(tmp_path)) == 2


def test_unfinished_checkpoints_are_deleted_also_those_of_early_stopping(tmp_path: Path) -> None:
    kept = [make_checkpoint(tmp_path, 10), tmp_path / "checkpoints" / "best"]
    for name in ("best", ".best.partial", ".best.old", ".step-000020.partial", ".step-000005.old"):
        (tmp_path / "checkpoints" / name).mkdir()
    delete_unfinished(tmp_path)
    assert sorted((tmp_path / "checkpoints").iterdir()) == sorted(kept)


def test_the_best_checkpoint_survives_a_kill_while_it_is_replaced(tmp_path: Path) -> None:
    old = tmp_path / "checkpoints" / ".best.old"
    old.mkdir(parents=True)
    (old / "position.json").touch()
    delete_unfinished(tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["best"]
    assert (tmp_path / "checkpoints" / "best" / "position.json").is_file()


def test_a_run_resumes_from_the_latest_run_of_its_name(tmp_path: Path) -> None:
    first = run_folder(tmp_path, "a", "a", 1.0)
    second = run_folder(tmp_path, "a-2", "a", 2.0)
    # Launched later, and under another name that only begins alike.
    make_checkpoint(run_folder(tmp_path, "a-b", "a-b", 3.0), 50)
    (tmp_path / "a-broken").mkdir()
    now = run_folder(tmp_path, "a-3", "a", 4.0)
    assert choose_for_rank(now).checkpoint is None
    old = make_checkpoint(first, 30)
    assert choose_for_rank(now).checkpoint == old
    newer = make_checkpoint(second, 20)
    assert choose_for_rank(now).checkpoint == newer, "the latest run, not the most steps"
    own = make_checkpoint(now, 5)
    assert choose_for_rank(now).checkpoint == own
    unnamed = run_folder(tmp_path, "2026", None, 5.0)
    assert choose_for_rank(unnamed).checkpoint is None


def test_resume_takes_runs_and_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    run = run_folder(tmp_path / "runs", "a", "a", 1.0)
    path = make_checkpoint(run, 10)
    for named in ("a", "runs/a", run, path, str(path)):
        assert Pretrain(resume=named).resume_from == path  # type: ignore[arg-type]
    later = make_checkpoint(run, 20)
    assert Pretrain(resume=run).resume_from == later
    assert Pretrain(resume=path).resume_from == path
    assert Pretrain(resume=True).resume_from is None and Pretrain().resume_from is None
    empty = run_folder(tmp_path / "runs", "empty", "empty", 1.0)
    for bad, why in (
        (empty, "this folder has none"),
        ("empty", "runs/empty has none"),
        ("b", "there is no such folder"),
        (7, "the path of a run"),
    ):
        with pytest.raises(ValueError, match=rf"^Pretrain\.resume is .*; allowed: True, False.*{why}"):
            Pretrain(resume=bad)  # type: ignore[arg-type]


def make_plan(arch: str, layout: Layout) -> Plan:
    return Plan(models[arch], Cluster.parse("2xcpu"), Recipe(seq_len=512, global_batch_size=2), layout)


def test_fault_31_a_checkpoint_that_does_not_load_is_refused_in_the_kernel(tmp_path: Path) -> None:
    saved_by = make_plan("gpt2", Layout.fsdp2())
    path = make_checkpoint(run_folder(tmp_path, "a", "a", 1.0, saved_by), 10)
    task = Pretrain(resume=path)
    task.check(saved_by)
    task.check(make_plan("gpt2", Layout.ddp()))
    with pytest.raises(ValueError, match=r"this plan trains llama-3\.2-1b"):
        task.check(make_plan("llama-3.2-1b", Layout.fsdp2()))
