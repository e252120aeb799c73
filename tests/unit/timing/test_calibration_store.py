"""Tests of stored calibrations: their folder, the one that predictions use, and damaged files."""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from calibrations import FLOPS, KERNEL_SECONDS, make_calibration, make_matmul

import shardscope as ss
from shardscope.frameworks.fsdp2.timing import OVERLAP
from shardscope.machine.host import count_cores
from shardscope.timing.calibration import store as calibration_store
from shardscope.timing.calibration.files import (
    NotStoredError,
    build_record_path,
    find_data_folder,
    get_machine_name,
)
from shardscope.timing.calibration.finished_runs import (
    MAX_RUNS,
    MeasuredStep,
    compute_median_step,
    find_residual,
)
from shardscope.timing.calibration.selection import select_rates
from shardscope.timing.calibration.store import (
    MachineRecord,
    check_writable,
    find_calibration,
    lock_file,
    read_record,
    store_calibration,
    store_step,
)
from shardscope.timing.rates import look_up_rates

CPU = ss.Cluster.parse("2xcpu")
H100 = ss.Cluster.parse("8xh100-sxm-80gb")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDSCOPE_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "data"


def plan(framework: str = "ddp", size: str = "2m", cluster: ss.Cluster = CPU) -> ss.Plan:
    layouts = {"ddp": ss.Layout.ddp, "fsdp2": ss.Layout.fsdp2}
    recipe = ss.Recipe(seq_len=64, global_batch_size=cluster.num_gpus, precision="fp32")
    return ss.Plan(ss.Architecture.of_size(size), cluster, recipe, layouts[framework]())


def build_step(
    a_plan: ss.Plan, seconds: float = 1.2, predicted: float | None = 1.0, **changes: Any
) -> MeasuredStep:
    fields: dict[str, Any] = {
        "run": "a-run",
        "finished_at": "2026-11-21T13:00:00+00:00",
        "plan": a_plan.to_dict(),
        "num_steps": 20,
        "seconds": seconds,
        "predicted_seconds": predicted,
        "predicted_from": select_rates(a_plan.cluster).source,
    }
    return MeasuredStep(**fields | changes)


def test_the_data_folder_follows_its_variable_and_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDSCOPE_DATA_HOME", "/somewhere")
    assert find_data_folder() == Path("/somewhere")
    monkeypatch.delenv("SHARDSCOPE_DATA_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", "/xdg")
    assert find_data_folder() == Path("/xdg/shardscope")
    monkeypatch.setenv("XDG_DATA_HOME", "not/absolute")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert find_data_folder() == Path("/home/somebody/.local/share/shardscope")
    assert find_data_folder("/given") == Path("/given")


@pytest.mark.parametrize("value", [7, "", "a\0b", True])
def test_an_invalid_folder_is_rejected(value: Any) -> None:
    with pytest.raises(ValueError, match=r"calibrate\.folder"):
        find_data_folder(value)


def test_stored_files_are_readable_by_their_user_only(folder: Path) -> None:
    path = store_calibration(make_calibration())
    assert path.parent == folder / "calibration"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    record = json.loads(path.read_text())
    assert record["shardscope"] == "MachineRecord" and record["version"] == 1
    assert not [file for file in path.parent.iterdir() if file.name not in (path.name, f".{path.name}.lock")]


def test_predictions_use_the_calibration_of_this_machine() -> None:
    with pytest.raises(ValueError, match=r"ss\.calibrate\(\)"):
        plan().step()
    assert select_rates(CPU) is look_up_rates(CPU)
    store_calibration(make_calibration())
    assert select_rates(CPU).get_matmul_rate("fp32").flops_per_second == pytest.approx(FLOPS, rel=1e-3)
    report = plan().step()
    assert report.seconds > 0
    assert f"the calibration of {get_machine_name()}" in report.calibration


def test_cpu_ranks_overlap_neither_communication_nor_kernel_launches() -> None:
    store_calibration(make_calibration())
    report = plan("fsdp2").step()
    assert report.parts["gathers"] > 0 and not any(report.hidden.values())
    slow_start = 1e-3
    store_calibration(make_calibration(kernel_seconds=slow_start))
    counted = select_rates(CPU).get_passes("transformers")
    kernels = plan("fsdp2").architecture.num_hidden_layers * (
        counted.kernels_forward + counted.kernels_backward + sum(OVERLAP.kernels)
    )
    added_seconds = plan("fsdp2").step().parts["elementwise"] - report.parts["elementwise"]
    assert added_seconds == pytest.approx(kernels * (slow_start - KERNEL_SECONDS), rel=1e-6)


def test_a_new_calibration_replaces_cached_predictions() -> None:
    store_calibration(make_calibration())
    before = select_rates(CPU).get_matmul_rate("fp32").flops_per_second
    faster = [make_matmul(size, flops=2 * FLOPS) for size in (128, 512, 2048)]
    a_plan = plan()
    slow = a_plan.step()
    assert a_plan.step() is slow, "computed once"
    store_calibration(make_calibration(matrix_products=faster))
    assert select_rates(CPU).get_matmul_rate("fp32").flops_per_second == pytest.approx(2 * before, rel=1e-2)
    assert a_plan.step().parts["matrices"] == pytest.approx(slow.parts["matrices"] / 2, rel=1e-2)
    record = read_record(build_record_path("cpu", find_data_folder()))
    assert record is not None and len(record.calibrations) == 1


def test_cpu_calibrations_require_equal_ranks_and_cores() -> None:
    store_calibration(make_calibration())
    assert find_calibration(ss.Cluster.parse("4xcpu")) is None
    store_calibration(make_calibration("4xcpu"))
    assert find_calibration(ss.Cluster.parse("4xcpu")) is not None
    assert find_calibration(CPU) is not None, "the one of two ranks is kept"
    store_calibration(make_calibration(num_cores=count_cores() + 1))
    assert find_calibration(CPU) is None


def test_cpu_calibrations_of_another_host_are_ignored(folder: Path) -> None:
    store_calibration(make_calibration(machine="another-host"))
    assert (folder / "calibration" / "another-host--cpu.json").is_file()
    assert find_calibration(CPU) is None


def test_gpu_calibrations_of_another_host_with_equal_gpus_are_used() -> None:
    assert find_calibration(H100) is None
    store_calibration(make_calibration("8xh100-sxm-80gb", machine="node-7"))
    nearest = find_calibration(H100)
    assert nearest is not None and nearest.machine == "node-7"
    assert "node-7" in select_rates(H100).source
    store_calibration(make_calibration("8xh100-sxm-80gb"))
    assert f"of {get_machine_name()} " in select_rates(H100).source, "this host's own comes first"
    assert find_calibration(ss.Cluster.parse("8xh200-sxm-141gb")) is None


def test_calibrations_of_equal_gpu_count_come_first_then_the_largest() -> None:
    for ranks in (1, 4):
        store_calibration(make_calibration(f"{ranks}xh100-sxm-80gb"))
    for ranks, num_ranks in ((1, 1), (4, 4), (8, 4)):
        nearest = find_calibration(ss.Cluster.parse(f"{ranks}xh100-sxm-80gb"))
        assert nearest is not None and nearest.num_ranks == num_ranks


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not json",
        "[]",
        '{"shardscope": "Plan", "version": 1}',
        '{"shardscope": "MachineRecord", "version": 99, "machine": "m", "gpu": "cpu"}',
        '{"shardscope": "MachineRecord", "version": 1, "machine": "m", "gpu": "cpu", "calibrations": 7}',
        '{"shardscope": "MachineRecord", "version": 1, "machine": "m", "gpu": "cpu", "steps": [NaN]}',
        "NAN",
    ],
)
def test_a_damaged_file_is_named_and_replaced_by_a_new_calibration(text: str) -> None:
    path = store_calibration(make_calibration())
    if text == "NAN":
        text = path.read_text().replace(f'"kernel_seconds": {KERNEL_SECONDS}', '"kernel_seconds": NaN')
        assert "NaN" in text
    path.write_text(text)
    with pytest.raises(ValueError, match="is no stored calibration") as error:
        select_rates(CPU)
    assert str(path) in str(error.value) and "ss.calibrate()" in str(error.value)
    store_calibration(make_calibration())
    assert select_rates(CPU).source == make_calibration().source
    assert path.with_suffix(".damaged").read_text() == text, "what was there is kept aside"


def test_a_too_large_file_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration_store, "MAX_FILE_BYTES", 100)
    path = build_record_path("cpu", find_data_folder())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{" + " " * 100 + "}")
    with pytest.raises(ValueError, match="102 bytes"):
        read_record(path)


def test_an_unwritable_folder_is_named_in_the_error(tmp_path: Path) -> None:
    blocked = tmp_path / "a-file"
    blocked.write_text("")
    for attempt in (lambda: check_writable(blocked), lambda: store_calibration(make_calibration(), blocked)):
        with pytest.raises(NotStoredError, match=r"measurements cannot be kept in .*SHARDSCOPE_DATA_HOME"):
            attempt()


def test_a_full_disk_is_named_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty file can be created on a full disk: a minute of measurements was lost after that."""

    def write(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(NotStoredError, match=r"cannot be kept in .*No space left on device\. Name a folder"):
        check_writable(tmp_path)
    monkeypatch.undo()
    check_writable(tmp_path)
    assert list((tmp_path / "calibration").iterdir()) == []


def test_a_file_can_be_locked_only_once(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with lock_file(path), pytest.raises(BlockingIOError), lock_file(path, wait=False):
        pass
    with lock_file(path, wait=False):
        pass


def test_concurrently_finished_runs_are_all_stored() -> None:
    a_plan = plan()
    threads = [
        threading.Thread(target=store_step, args=(build_step(a_plan, run=f"run-{i}", predicted=None), "cpu"))
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    record = read_record(build_record_path("cpu", find_data_folder()))
    assert record is not None and {step.run for step in record.steps} == {f"run-{i}" for i in range(8)}


def test_stored_steps_are_limited_and_survive_a_new_calibration() -> None:
    record = MachineRecord(machine="m", gpu="cpu")
    for number in range(MAX_RUNS + 3):
        record = record.with_step(build_step(plan(), run=f"run-{number}", predicted=None))
    assert len(record.steps) == MAX_RUNS and record.steps[-1].run == f"run-{MAX_RUNS + 2}"
    assert record.with_calibration(make_calibration()).steps == record.steps
    assert MachineRecord.from_json(record.to_json()) == record


def test_the_residual_covers_runs_of_equal_model_and_framework() -> None:
    store_calibration(make_calibration())
    a_plan = plan("fsdp2")
    assert find_residual(a_plan) is None
    store_step(build_step(a_plan, 1.1), "cpu")
    store_step(build_step(plan("ddp"), 9.0), "cpu")
    store_step(build_step(plan("fsdp2", "4m"), 9.0), "cpu")
    store_step(build_step(a_plan, 9.0, predicted_from="other constants"), "cpu")
    store_step(build_step(a_plan, 9.0, predicted=None), "cpu")
    report = a_plan.step()
    one = report.residual
    assert one is not None and one.num_runs == 1 and one.median == pytest.approx(1.1)
    assert "one finished run" in one.words and "1.10 times the predicted step" in one.words
    store_step(build_step(a_plan, 1.3), "cpu")
    assert report.residual == find_residual(a_plan), "a run that finished since is counted"
    two = find_residual(a_plan)
    assert two is not None and (two.num_runs, two.low, two.high) == (
        2,
        pytest.approx(1.1),
        pytest.approx(1.3),
    )
    assert "1.20 times" in two.words and "not corrected" in two.words
    store_step(build_step(a_plan, 1.2, load=3.0), "cpu")
    three = find_residual(a_plan)
    assert three is not None and three.num_busy == 1 and "1 of them while it was busy" in three.words
    assert a_plan.step() is report and report.residual == three
    assert "1.20 times" in report.to_html() and report.calibration in report.to_html()
    assert plan("fsdp2", "8m").step().residual is None


def test_finished_runs_do_not_change_predictions() -> None:
    store_calibration(make_calibration())
    a_plan = plan()
    before = a_plan.step().seconds
    store_step(build_step(a_plan, 100 * before, predicted=before), "cpu")
    assert a_plan.step().seconds == before


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seconds", float("nan")),
        ("seconds", -1.0),
        ("predicted_seconds", float("inf")),
        ("num_steps", 0),
        ("load", -1.0),
        ("plan", {"architecture": {}}),
        ("run", ""),
        ("predicted_from", 7),
    ],
)
def test_invalid_measured_steps_are_rejected(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"MeasuredStep.{field}"):
        build_step(plan(), **{field: value})


def test_the_median_step_excludes_the_first_steps() -> None:
    def make_lines(seconds: list[float]) -> list[dict[str, Any]]:
        return [
            {"step": step, "rank": rank, "step_seconds": seconds_of_step}
            for step, seconds_of_step in enumerate(seconds)
            for rank in (0, 1)
        ]

    assert compute_median_step(make_lines([9.0, 9.0, 9.0, 1.0, 1.0, 2.0, 1.0, 1.0])) == (5, 1.0)
    assert compute_median_step(make_lines([1.0] * 7)) is None, "too few"
    assert compute_median_step([{"step": step, "loss": 1.0} for step in range(50)]) is None
    odd = [
        {"step": step, "step_seconds": seconds_of_step}
        for step, seconds_of_step in enumerate(["x", float("nan"), -1.0] * 9)
    ]
    assert compute_median_step(odd) is None


def test_reading_calibrations_writes_no_file(folder: Path) -> None:
    select_rates(CPU), select_rates(H100), find_residual(plan())
    assert not folder.exists()
    assert os.environ["SHARDSCOPE_DATA_HOME"] == str(folder)
