"""Tests of predictions in a run's charts, and of runs without predictions."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import shardscope as ss
from shardscope.records import follow as follow_module
from shardscope.records.folder import RunFolder
from shardscope.records.follow import PIECE_BYTES
from shardscope.records.json_files import append_line, write_json
from shardscope.runs.explain.measured import sum_predicted_tensors
from shardscope.runs.explain.memory_by_rank import predict_rank_memory, read_rank_memory

ON_GPUS = ss.Plan(
    ss.models["gpt2"],
    ss.Cluster.parse("8xh100-sxm-80gb"),
    ss.Recipe(seq_len=512, global_batch_size=64),
    ss.Layout.fsdp2(),
)
ON_CPUS = ss.Plan(
    ss.Architecture.of_size("2m"),
    ss.Cluster.parse("2xcpu"),
    ss.Recipe(seq_len=64, global_batch_size=4),
    ss.Layout.ddp(),
)
STEP = {"step_seconds": 0.5, "from": "the calibration of here"}


def attach(folder: Path, plan: ss.Plan, engine: Any = None, **description: Any) -> ss.Run:
    run = RunFolder(folder / "run")
    run.create()
    described = {"world_size": 2, "created": time.time(), "plan": json.loads(plan.to_json()), **description}
    write_json(run.run_json, described)
    if engine is not None:
        write_json(run.engine_report(0), {"engine": engine})
    return ss.Run.attach(run.path)


def test_a_run_that_trains_the_plan_has_predicted_metrics(tmp_path: Path) -> None:
    run = attach(tmp_path, ON_GPUS, trains_the_plan=True, predicted=STEP, num_steps=40)
    metrics = run.predicted_metrics()
    assert metrics is not None and run.num_steps == 40 and run.trains_the_plan
    assert metrics.step_seconds == 0.5 and metrics.step_source == "the calibration of here"
    assert metrics.tokens_per_second == 64 * 512 / 8 / 0.5
    assert metrics.peak_memory_bytes == sum_predicted_tensors(ON_GPUS.memory())
    assert metrics.get("loss") is None and metrics.get("step_seconds") == 0.5


def test_cpu_ranks_are_compared_with_tensors_that_outlive_a_step(tmp_path: Path) -> None:
    metrics = attach(tmp_path, ON_CPUS, trains_the_plan=True).predicted_metrics()
    parts = ON_CPUS.memory().at("optimizer")
    assert metrics is not None and metrics.step_seconds is None and metrics.tokens_per_second is None
    assert metrics.peak_memory_bytes == parts["parameters"] + parts["gradients"] + parts["optimizer"]
    assert "optimizer" in metrics.memory_content


def test_memory_of_a_script_on_cpu_ranks_is_its_processes_and_is_not_predicted(tmp_path: Path) -> None:
    engine = {"num_parameters": ON_CPUS.architecture.num_parameters}
    metrics = attach(tmp_path, ON_CPUS, engine, trains_the_plan=False, predicted=STEP).predicted_metrics()
    assert metrics is not None and metrics.step_seconds == 0.5
    assert metrics.get("peak_memory_bytes") is None and metrics.memory_title == "memory"


@pytest.mark.parametrize("engine", [None, "x", {}, {"num_parameters": 12}, {"sentence": "FSDP2"}])
def test_a_function_that_trains_another_model_has_no_predictions(tmp_path: Path, engine: Any) -> None:
    run = attach(tmp_path, ON_GPUS, engine, trains_the_plan=False, predicted=STEP)
    assert run.predicted_metrics() is None and run.num_steps is None


def test_a_function_that_trains_the_plans_model_has_predictions(tmp_path: Path) -> None:
    engine = {"num_parameters": ON_GPUS.architecture.num_parameters}
    metrics = attach(tmp_path, ON_GPUS, engine, trains_the_plan=False, predicted=STEP).predicted_metrics()
    assert metrics is not None and metrics.step_seconds == 0.5


@pytest.mark.parametrize("seconds", ["x", -1, True, 0, "NaN"])
def test_a_damaged_step_prediction_is_none(tmp_path: Path, seconds: Any) -> None:
    predicted = {"step_seconds": seconds}
    metrics = attach(tmp_path, ON_GPUS, trains_the_plan=True, predicted=predicted).predicted_metrics()
    assert metrics is not None and metrics.step_seconds is None


def test_a_run_with_an_unreadable_plan_has_no_predictions(tmp_path: Path) -> None:
    run = attach(tmp_path, ON_GPUS, trains_the_plan=True)
    described = json.loads((run.folder / "run.json").read_text())
    write_json(run.folder / "run.json", {**described, "plan": {"version": -1}})
    assert ss.Run.attach(run.folder).predicted_metrics() is None


def test_tensor_bytes_of_each_rank_are_split_by_component() -> None:
    def record(activations: int) -> dict[str, Any]:
        phases = {
            "rest": {"parameters": 10, "optimizer": 20},
            "backward": {"parameters": 10, "activations": activations, "logits": 0, "communication": 3},
        }
        return {"memory": {"device": "cpu", "step": 2, "phases": phases, "rss_before_steps": 500}}

    found = read_rank_memory({0: record(40), 3: record(5), 4: {"engine": {}}})
    assert found[0].components == {"parameters": 10, "activations": 40} and found[0].phase == "backward"
    assert found[3].components == {"parameters": 10, "optimizer": 20} and found[3].num_bytes == 30
    assert set(found) == {0, 3}
    predicted = predict_rank_memory(ON_GPUS.memory())
    assert predicted.num_bytes == sum_predicted_tensors(ON_GPUS.memory())


def test_a_long_run_is_read_in_pieces_without_losing_records(tmp_path: Path) -> None:
    run = attach(tmp_path, ON_CPUS)
    folder = RunFolder(run.folder)
    line = {"rank": 0, "time": 1.0, "text": "x" * 500, "loss": float("nan")}
    with folder.events(0).open("w") as file:
        for step in range(4000):
            file.write(json.dumps({**line, "loss": "NaN", "step": step}) + "\n")
        file.write(json.dumps({"step": 4000, "rank": 0, "time": 1.0, "text": "y" * (3 * PIECE_BYTES)}) + "\n")
    append_line(folder.events(1), {"step": 0, "rank": 1, "time": 1.0})
    follow, steps, looks = run.follow(), [], 0
    while True:
        new = follow.read()
        assert len(new) < 3000
        steps += [record["step"] for record in new if record["rank"] == 0]
        looks += 1
        assert all(record["loss"] != record["loss"] for record in new if "loss" in record)
        if not follow.is_behind:
            break
    assert steps == list(range(4001)) and looks > 3
    assert follow.read() == []
    append_line(folder.events(0), {"step": 4001, "rank": 0, "time": 2.0})
    assert [record["step"] for record in follow.read()] == [4001]


def test_fault_60_a_reader_far_behind_reads_an_even_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = attach(tmp_path, ON_CPUS)
    folder = RunFolder(run.folder)
    monkeypatch.setattr(follow_module, "MAX_BEHIND_BYTES", 2 * 2**18)  # For two ranks.
    monkeypatch.setattr(follow_module, "SAMPLE_BYTES", 2**11)
    lines = [json.dumps({"step": step, "rank": 0, "time": 1.0}) + "\n" for step in range(200_000)]
    folder.events(0).write_text("".join(lines))
    size = folder.events(0).stat().st_size
    follow = run.follow()
    steps = [record["step"] for record in follow.read()]
    while follow.is_behind:
        steps += [record["step"] for record in follow.read()]
    assert steps == sorted(steps) and steps[0] == 0 and steps[-1] == 199_999
    assert max(after - before for before, after in pairwise(steps)) < 4000, "no part of it is left out"
    assert follow.num_read_bytes < size / 4 and follow.num_read_bytes + follow.num_skipped_bytes == size
    folder.events(0).write_text("".join([*lines, json.dumps({"step": 200_000, "rank": 0}) + "\n"]))
    assert [record["step"] for record in follow.read()] == [200_000]


def test_a_note_is_stored_in_the_run_folder(tmp_path: Path) -> None:
    run = attach(tmp_path, ON_CPUS)
    assert run.note == ""
    run.note = "a rehearsal"
    assert ss.Run.attach(run.folder).note == "a rehearsal"
