"""Tests of step times of finished runs, stored with the calibration of their machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from calibrations import make_calibration

import shardscope as ss
from shardscope.records.folder import RunFolder
from shardscope.records.json_files import append_line
from shardscope.runs.explain.measured_step import MIN_PROFILED_STEPS, predict_step, store_measured_step
from shardscope.timing.calibration.files import build_record_path, find_data_folder
from shardscope.timing.calibration.finished_runs import MIN_STEPS, SKIPPED_STEPS
from shardscope.timing.calibration.store import read_record, store_calibration


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


def build_run_json(plan: ss.Plan) -> dict[str, Any]:
    """Return the fields of run.json that a measured step needs, as ``launch`` writes them."""
    return {
        "name": "a-run",
        "world_size": 2,
        "plan": json.loads(plan.to_json()),
        "predicted": predict_step(plan),
    }


def log_steps(folder: RunFolder, num_steps: int, seconds: float) -> None:
    for step in range(num_steps):
        for rank in (0, 1):
            append_line(folder.events(rank), {"step": step, "rank": rank, "step_seconds": seconds})


def test_the_step_is_predicted_at_launch_if_there_is_a_calibration(plan: ss.Plan) -> None:
    assert predict_step(plan) is None
    store_calibration(make_calibration())
    prediction = predict_step(plan)
    assert prediction == {"step_seconds": plan.step().seconds, "from": make_calibration().source}


def test_a_finished_run_is_compared_with_its_prediction(folder: RunFolder, plan: ss.Plan) -> None:
    store_calibration(make_calibration())
    run_json, seconds = build_run_json(plan), 1.5 * plan.step().seconds
    log_steps(folder, SKIPPED_STEPS + MIN_STEPS, seconds)
    assert store_measured_step(folder, run_json)
    residual = plan.step().residual
    assert residual is not None and residual.median == pytest.approx(1.5)


def test_step_times_are_stored_without_a_prediction(folder: RunFolder, plan: ss.Plan) -> None:
    run_json = build_run_json(plan)
    log_steps(folder, 20, 0.25)
    assert store_measured_step(folder, run_json)
    record = read_record(build_record_path("cpu", find_data_folder()))
    assert record is not None and record.steps[0].seconds == 0.25 and record.steps[0].ratio is None
    assert not record.calibrations


def test_runs_of_too_few_steps_are_not_stored(folder: RunFolder, plan: ss.Plan) -> None:
    log_steps(folder, SKIPPED_STEPS + MIN_STEPS - 1, 0.25)
    assert not store_measured_step(folder, build_run_json(plan))
    assert not find_data_folder().exists()


def test_short_profiled_runs_are_not_stored(folder: RunFolder, plan: ss.Plan) -> None:
    folder.trace(0).write_bytes(b"")
    log_steps(folder, SKIPPED_STEPS + MIN_STEPS, 0.25)
    assert not store_measured_step(folder, build_run_json(plan))
    log_steps(folder, SKIPPED_STEPS + MIN_PROFILED_STEPS, 0.25)
    assert store_measured_step(folder, build_run_json(plan))


def test_malformed_lines_of_metrics_are_skipped(folder: RunFolder, plan: ss.Plan) -> None:
    folder.events(0).write_text('ep": 3}\n[1]\nnull\n')
    log_steps(folder, 20, 0.25)
    append_line(folder.events(0), {"step": "x", "step_seconds": "NaN"})
    assert store_measured_step(folder, build_run_json(plan))
