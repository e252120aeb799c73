"""What a run folder's metrics become beside the calibration of its machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from calibrations import calibration

import shardscope as ss
from shardscope.records.folder import RunFolder
from shardscope.records.json_files import append_line
from shardscope.runs.explain.measured_step import MIN_PROFILED_STEPS, predict_step, store_measured_step
from shardscope.timing.calibration.finished_runs import MIN_STEPS, SKIPPED_STEPS
from shardscope.timing.calibration.store import (
    build_record_path,
    find_data_folder,
    read_record,
    store_calibration,
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv("SHARDSCOPE_DATA_HOME", str(tmp_path / "data"))
    run = RunFolder(tmp_path / "runs" / "a-run")
    run.create()
    return run


@pytest.fixture
def plan() -> ss.Plan:
    recipe = ss.Recipe(seq_len=64, global_batch_size=2, precision="fp32")
    return ss.Plan(ss.Architecture.of_size("2m"), ss.Cluster.parse("2xcpu"), recipe, ss.Layout.ddp())


def description(plan: ss.Plan) -> dict[str, Any]:
    """As ``launch`` writes it, as far as a measured step needs it."""
    return {
        "name": "a-run",
        "world_size": 2,
        "plan": json.loads(plan.to_json()),
        "predicted": predict_step(plan),
    }


def log(folder: RunFolder, num_steps: int, seconds: float) -> None:
    for step in range(num_steps):
        for rank in (0, 1):
            append_line(folder.events(rank), {"step": step, "rank": rank, "step_seconds": seconds})


def test_a_step_is_predicted_at_launch_where_it_can_be(plan: ss.Plan) -> None:
    assert predict_step(plan) is None
    store_calibration(calibration())
    said = predict_step(plan)
    assert said == {"step_seconds": plan.step().seconds, "from": calibration().source}


def test_a_finished_run_is_held_against_its_prediction(folder: RunFolder, plan: ss.Plan) -> None:
    store_calibration(calibration())
    told, took = description(plan), 1.5 * plan.step().seconds
    log(folder, SKIPPED_STEPS + MIN_STEPS, took)
    assert store_measured_step(folder, told)
    found = plan.step().residual
    assert found is not None and found.median == pytest.approx(1.5)


def test_without_a_prediction_the_step_is_kept_all_the_same(folder: RunFolder, plan: ss.Plan) -> None:
    told = description(plan)
    log(folder, 20, 0.25)
    assert store_measured_step(folder, told)
    record = read_record(build_record_path("cpu", find_data_folder()))
    assert record is not None and record.steps[0].seconds == 0.25 and record.steps[0].ratio is None
    assert not record.calibrations


def test_too_few_steps_are_not_kept(folder: RunFolder, plan: ss.Plan) -> None:
    log(folder, SKIPPED_STEPS + MIN_STEPS - 1, 0.25)
    assert not store_measured_step(folder, description(plan))
    assert not find_data_folder().exists()


def test_a_short_recorded_run_is_not_kept(folder: RunFolder, plan: ss.Plan) -> None:
    folder.trace(0).write_bytes(b"")
    log(folder, SKIPPED_STEPS + MIN_STEPS, 0.25)
    assert not store_measured_step(folder, description(plan))
    log(folder, SKIPPED_STEPS + MIN_PROFILED_STEPS, 0.25)
    assert store_measured_step(folder, description(plan))


def test_broken_lines_of_metrics_are_passed_over(folder: RunFolder, plan: ss.Plan) -> None:
    folder.events(0).write_text('ep": 3}\n[1]\nnull\n')
    log(folder, 20, 0.25)
    append_line(folder.events(0), {"step": "x", "step_seconds": "NaN"})
    assert store_measured_step(folder, description(plan))
