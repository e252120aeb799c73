"""Grids of sweeps, the names of their runs, what is refused, and the queue, without starting processes."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_gpus import TOTAL, pretend_cards
from fake_runs import wait_until
from tests.requirements import needs_installed
from written_runs import PLAN, write_run

import shardscope as ss
from shardscope.machine.detection import select_visible_devices
from shardscope.machine.processes import identify_machine, read_start_time
from shardscope.records.folder import RunFolder
from shardscope.records.json_files import append_line, write_json
from shardscope.runs import sweep as sweep_module
from shardscope.runs.backends import this_machine
from shardscope.runs.sweep import Sweep
from shardscope.runs.sweep_grid import build_grid

TASK = ss.Pretrain(num_steps=40)
RATES = {"learning_rate": [1e-3, 1e-2]}


@dataclass(frozen=True)
class Odd:
    """A task of the user's with a field that the recipe has, too."""

    dropout: float = 0.0
    files: tuple[str, ...] = ()

    def __call__(self, ctx: Any) -> None:
        """Never called here."""


class EarlyStopping(Odd):
    """A task that stops early, as ``Finetune`` does."""

    early_stopping = 2


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The GPU positions of each launch; no process is started. The run stays "starting" until ended."""
    positions: list[Any] = []

    def start(folder: RunFolder, outlive_kernel: bool, gpu_positions: Any) -> None:
        assert outlive_kernel
        positions.append(gpu_positions)
        me = {"pid": os.getpid(), "started": read_start_time(os.getpid()), "machine": identify_machine()}
        write_json(folder.supervisor, me, as_is=("machine",))

    monkeypatch.setattr(this_machine, "start_supervisor", start)
    monkeypatch.setattr(sweep_module, "POLL_SECONDS", 0.01)
    yield positions
    for sweep in sweep_module._active.values():
        sweep._is_stopped = True
    sweep_module._active.clear()


def end(run: ss.Run, status: str = "finished") -> None:
    append_line(run.folder / "status.jsonl", {"time": 1.0, "status": status, "reason": "x"})


def log(run: ss.Run, **values: list[float]) -> None:
    for name, numbers in values.items():
        for step, number in enumerate(numbers):
            line = {"step": step, "rank": 0, "time": 1.0, name: number}
            append_line(run.folder / "events" / "rank-0.jsonl", line)


def test_a_grid_is_the_product_of_recipe_and_task_fields() -> None:
    over = {"learning_rate": np.array([1e-3, 1e-2]), "seq_len": [32, np.int64(64)]}
    grid = build_grid(PLAN, TASK, over, "lr")
    assert [(each.task.learning_rate, each.plan.recipe.seq_len) for each in grid] == [  # type: ignore[attr-defined]
        *((1e-3, 32), (1e-3, 64)),
        *((1e-2, 32), (1e-2, 64)),
    ]
    assert grid[1].name == "lr,learning_rate=0.001,seq_len=64" and grid[1].values["seq_len"] == 64
    assert {each.plan.layout for each in grid} == {PLAN.layout}


def test_names_are_folder_names_and_differ() -> None:
    names = [each.name for each in build_grid(PLAN, Odd(), {"files": [["a/b"], ["a_b"], ["x" * 200]]}, "s")]
    assert len(set(names)) == 3 and all(len(name) <= 100 and "/" not in name for name in names)
    # A combination keeps its name when values are added.
    assert build_grid(PLAN, Odd(), {"files": [["x" * 200]]}, "s")[0].name == names[2]


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"learning_rat": [1e-3]}, r"field is 'learning_rat'.*Nearest fix: 'learning_rate'"),
        ({}, r"sweep\.over is \{\}; allowed: a mapping of field names"),
        ({"learning_rate": 1e-3}, r"learning_rate is 0\.001; allowed: a list.*Nearest fix: \[0\.001\]"),
        ({"learning_rate": []}, "at least one value"),
        ({"learning_rate": [1e-3, 1e-3]}, r"is 0\.001; allowed: each value once"),
        ({"learning_rate": [object()]}, "allowed: numbers"),
        ({"seed": range(65)}, "'65 combinations'; allowed: 1 to 64"),
        ({"learning_rate": [1e-3, 20]}, r"sweep\.over learning_rate=20: Pretrain\.learning_rate is 20"),
        ({"lora_rank": [8]}, r"over lora_rank=8: Recipe\.lora_rank is 8"),
        ({"global_batch_size": [2, 3]}, "over global_batch_size=3: "),
        ({"seq_len": [64, 1]}, r"over seq_len=1: Recipe\.seq_len is 1; allowed: at least 2"),
        ({"global_batch_size": [2**17], "micro_batch_size": [1, 2**16]}, "size=65536: the plan does not fit"),
    ],
)
@needs_installed("torch")
def test_bad_grids_are_refused_before_a_run_starts(
    over: Any, message: str, tmp_path: Path, started: list[Any]
) -> None:
    with pytest.raises(ValueError, match=message):
        ss.sweep(PLAN, TASK, over, folder=tmp_path)
    assert not started and not list(tmp_path.iterdir())


def test_a_field_of_both_needs_its_owner() -> None:
    with pytest.raises(ValueError, match=r"Recipe\.dropout or Odd\.dropout: both have it"):
        build_grid(PLAN, Odd(), {"dropout": [0.1]}, "s")
    (one,) = build_grid(PLAN, Odd(), {"Odd.dropout": [0.1]}, "s")
    assert one.task == Odd(dropout=0.1) and one.plan == PLAN and one.name == "s,dropout=0.1"


@needs_installed("torch")
def test_runs_start_as_others_end_and_a_sweep_is_found_again(tmp_path: Path, started: list[Any]) -> None:
    over = {"learning_rate": [1e-3, 1e-2, 0.1]}
    sweep = ss.sweep(PLAN, TASK, over, name="lr", folder=tmp_path)
    assert [run.name for run in sweep] == ["lr,learning_rate=0.001"] and sweep.status == "running"
    assert ss.sweep(PLAN, TASK, over, name="lr", folder=tmp_path) is sweep
    assert not wait_until(lambda: len(sweep) > 1, 0.1)
    sweep[0].stop()  # One run: the others go on.
    end(sweep[0], "stopped")
    assert wait_until(lambda: len(sweep) == 2)
    with pytest.raises(ValueError, match="stopped, starting, waiting"):
        sweep.best()
    end(sweep[1])
    assert wait_until(lambda: len(sweep) == 3)
    sweep.stop()
    assert sweep.status == "running"
    with pytest.raises(ValueError, match=r"0\.1' is|being stopped.*sweep\.wait\(\)"):
        ss.sweep(PLAN, TASK, over, name="lr", folder=tmp_path)
    end(sweep[2], "stopped")
    assert sweep.wait(1) == "stopped"
    # In another kernel: only the run that sweep.stop() ended is launched again.
    sweep_module._active.clear()
    again = ss.sweep(PLAN, TASK, over, name="lr", folder=tmp_path)
    assert [entry.status for entry in again._entries] == ["stopped", "finished", "starting"]
    assert again[2].name == "lr,learning_rate=0.1-2" and len(started) == 4
    assert list(again.to_frame()["learning_rate"]) == over["learning_rate"]
    end(again[2])
    with pytest.raises(ValueError, match=r"lr,learning_rate=0\.001 had other ones: num_steps 40 → 50"):
        ss.sweep(PLAN, ss.Pretrain(num_steps=50), over, name="lr", folder=tmp_path)


def test_best_compares_the_weights_that_runs_kept(tmp_path: Path) -> None:
    grid = build_grid(PLAN, TASK, RATES, "lr")
    # The first learns faster, and then overfits.
    for each, losses, loss in zip(grid, ([3.0, 1.0, 2.0], [3.0, 1.5, 1.5]), (0.5, 1.1), strict=True):
        run = ss.Run.attach(write_run(each.name, parent=tmp_path, num_done=0, task=each.task))  # type: ignore[arg-type]
        log(run, loss=[3.0, 0.1, loss], validation_loss=losses)
    entries = [sweep_module._find_entry(each, tmp_path) for each in grid]
    sweep = Sweep("lr", tmp_path, entries, at_once=1, force=False)
    assert sweep.best() is sweep[1] and sweep.best("loss") is sweep[0]
    assert list(sweep.to_frame()["best_validation_loss"]) == [1.0, 1.5]
    assert "<th>learning rate</th>" in sweep._repr_html_() and "2 finished" in sweep._repr_html_()
    assert sweep.compare(*[run.name for run in sweep]).task_differences == ["learning rate 0.001 → 0.01"]
    for entry in entries:  # With early stopping, the best checkpoint is kept and exported.
        entry.combination = replace(entry.combination, task=EarlyStopping())
    assert sweep.best() is sweep[0]
    with pytest.raises(ValueError, match="logged accuracy"):
        sweep.best("accuracy")


def test_a_run_whose_losses_are_no_numbers_has_no_best_one(tmp_path: Path) -> None:
    grid = build_grid(PLAN, TASK, RATES, "lr")
    for each, losses in zip(grid, ([math.nan, math.nan], [math.nan, 2.0]), strict=True):
        run = ss.Run.attach(write_run(each.name, parent=tmp_path, num_done=0, task=each.task))  # type: ignore[arg-type]
        log(run, loss=[3.0, 2.0], validation_loss=losses)
    entries = [sweep_module._find_entry(each, tmp_path) for each in grid]
    frame = Sweep("lr", tmp_path, entries, at_once=1, force=False).to_frame()
    assert math.isnan(frame["best_validation_loss"][0]) and frame["best_validation_loss"][1] == 2.0


@pytest.mark.parametrize("status", ["lost", "failed"])
def test_a_run_without_a_result_has_its_reason_in_the_table(status: str, tmp_path: Path) -> None:
    grid = build_grid(PLAN, TASK, RATES, "lr")
    for each, ended in zip(grid, ("finished", status), strict=True):
        write_run(each.name, ended, parent=tmp_path, task=TASK, reason=f"it {ended}")
    entries = [sweep_module._Entry(each, ss.Run.attach(tmp_path / each.name)) for each in grid]
    sweep = Sweep("lr", tmp_path, entries, at_once=1, force=False)
    assert list(sweep.to_frame()["problem"]) == ["", f"it {status}"]
    assert f"it {status}" in sweep._repr_html_()


@needs_installed("torch")
def test_runs_side_by_side_get_gpus_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[Any]
) -> None:
    pretend_cards(monkeypatch, [TOTAL] * 5)
    plan = ss.Plan(
        ss.Architecture.of_size("1b"), ss.Cluster.parse("2xh100-sxm-80gb"), ss.Recipe(), ss.Layout.fsdp2()
    )
    with pytest.raises(ValueError, match=r"at_once is 3; .* 1 to 2"):
        ss.sweep(plan, TASK, RATES, at_once=3, folder=tmp_path)
    sweep = ss.sweep(plan, TASK, {"seed": [1, 2, 3]}, at_once=2, folder=tmp_path)
    assert wait_until(lambda: len(sweep) == 2) and started == [[0, 1], [2, 3]]
    end(sweep[0])
    assert wait_until(lambda: len(sweep) == 3) and started[2] == [0, 1]
    assert [run.gpus for run in sweep] == [[0, 1], [2, 3], [0, 1]]
    assert select_visible_devices(None, [2, 3]) == "2,3"
    assert select_visible_devices("GPU-a,GPU-b,GPU-c", [2, 0]) == "GPU-c,GPU-a"
    for run in sweep:
        end(run)
