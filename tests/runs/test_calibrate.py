"""``ss.calibrate()`` for real on CPU ranks, short, and how it ends when it is not let finish."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from run_helpers import make_plan, seconds_until
from tests.requirements import thorough

import shardscope as ss
from shardscope.machine.host import count_cores
from shardscope.runs.calibrate import process
from shardscope.runs.calibrate.process import CalibrationError
from shardscope.timing.calibration.curves import COLLECTIVES, Calibration
from shardscope.timing.calibration.files import build_record_path, find_data_folder
from shardscope.timing.calibration.finished_runs import find_residual
from shardscope.timing.calibration.selection import select_rates
from shardscope.timing.calibration.store import lock_file, read_record

pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("bounded_time")]

TWO_RANKS = ss.Cluster.parse("2xcpu")

CALIBRATE = """
import json, sys
import shardscope as ss
said = []
def progress(words, fraction):
    if not said or said[-1][0] != words:
        said.append([words, fraction])
        print(json.dumps({"progress": said[-1]}), flush=True)
one = ss.calibrate(ss.Cluster.parse("2xcpu"), seconds=float(sys.argv[1]), progress=progress)
heavy = sorted({"torch", "plotly", "ipywidgets"} & set(sys.modules))
print(json.dumps({"calibration": one.to_dict(), "heavy": heavy}), flush=True)
"""


def list_ranks(kernel: int) -> list[psutil.Process]:
    """The measuring processes that process ``kernel`` started."""
    results = []
    for each in psutil.process_iter():
        try:
            line = each.cmdline()
            if "shardscope.runs.calibrate.rank" in line and str(kernel) in line:
                results += [each] if each.status() != psutil.STATUS_ZOMBIE else []
        except psutil.Error:
            continue
    return results


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDSCOPE_DATA_HOME", str(tmp_path / "data"))
    # As many threads as launched ranks get, whatever the tests themselves run with.
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return tmp_path / "data"


def start_kernel(seconds: float) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        [sys.executable, "-c", CALIBRATE, str(seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


@thorough()
def test_two_cpu_ranks_are_measured_stored_and_used(folder: Path) -> None:
    kernel = start_kernel(8.0)
    try:
        out, complaint = kernel.communicate(timeout=60)
    finally:
        kernel.kill()
    assert kernel.returncode == 0, complaint
    *steps, last = map(json.loads, out.splitlines())
    assert last["heavy"] == [], "the kernel imports no torch"
    assert not list_ranks(kernel.pid)
    words = [step["progress"][0] for step in steps]
    assert "measuring matrix products" in words and "measuring collectives" in words and words[-1] == "done"
    fractions = [step["progress"][1] for step in steps]
    assert fractions == sorted(fractions) and fractions[-1] == 1.0

    one = Calibration.from_dict(last["calibration"])
    assert (one.gpu, one.num_ranks, one.backend) == ("cpu", 2, "gloo")
    assert one.threads_per_rank == max(1, count_cores() // 2)
    assert {"fp32", "bf16"} == {product.precision for product in one.matrix_products}
    assert {call.collective for call in one.collectives} == set(COLLECTIVES)
    assert not one.host_copies
    kept = read_record(build_record_path("cpu", find_data_folder()))
    assert kept is not None and kept.calibrations == (one,)

    rates = select_rates(TWO_RANKS)
    assert rates.source == one.source
    best = max(product.flops_per_second for product in one.matrix_products)
    for precision in ("fp32", "bf16"):
        assert 0 < rates.get_matmul_rate(precision).flops_per_second < 100 * best
    plan = make_plan(2)
    assert plan.step().seconds > 0 and one.source in plan.step().calibration
    assert sorted(file.name for file in (folder / "calibration").iterdir() if file.name[0] != ".") == [
        build_record_path("cpu", find_data_folder()).name
    ]


def test_an_exception_in_the_progress_callback_ends_the_calibration(folder: Path) -> None:
    class CancelledError(Exception):
        """Somebody pressed cancel."""

    def cancel_on_first_measurement(words: str, _fraction: float) -> None:
        if words.startswith("measuring"):
            assert len(list_ranks(os.getpid())) == 2
            raise CancelledError

    with pytest.raises(CancelledError):
        ss.calibrate(TWO_RANKS, seconds=60, progress=cancel_on_first_measurement)
    assert not list_ranks(os.getpid())
    assert not list((folder / "calibration").glob("*.json"))
    with lock_file(
        build_record_path("cpu", folder).with_name("measuring-" + build_record_path("cpu", folder).name),
        wait=False,
    ):
        pass


def test_a_killed_kernel_leaves_no_rank() -> None:
    kernel = start_kernel(60.0)
    assert kernel.stdout is not None
    for line in kernel.stdout:
        if "measuring" in line:
            break
    assert len(list_ranks(kernel.pid)) == 2
    kernel.send_signal(signal.SIGKILL)
    kernel.communicate()
    seconds_until(lambda: not list_ranks(kernel.pid), timeout=10)


def test_the_error_output_of_a_failed_rank_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "torch.py").write_text("raise ImportError('this torch is broken')")
    monkeypatch.syspath_prepend(str(tmp_path / "broken"))
    with pytest.raises(CalibrationError, match="this torch is broken"):
        ss.calibrate(TWO_RANKS, seconds=5)
    assert not list_ranks(os.getpid())


def test_a_calibration_that_takes_too_long_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "START_SECONDS", -7.0)
    with pytest.raises(TimeoutError, match="longer than"):
        ss.calibrate(TWO_RANKS, seconds=5)
    assert not list_ranks(os.getpid())


def test_a_second_calibration_at_the_same_time_raises(folder: Path) -> None:
    path = build_record_path("cpu", folder)
    with (
        lock_file(path.with_name(f"measuring-{path.name}")),
        pytest.raises(RuntimeError, match="is already running"),
    ):
        ss.calibrate(TWO_RANKS, seconds=5)


@thorough()
def test_a_finished_run_stores_its_step_time(tmp_path: Path, plan: Any) -> None:
    run = ss.launch(plan, ss.Pretrain(num_steps=10), folder=tmp_path / "runs")
    assert run.wait(timeout=80) == "finished", run.error
    path = build_record_path("cpu", find_data_folder())
    seconds_until(path.is_file, timeout=10)
    record = read_record(path)
    assert record is not None
    (step,) = record.steps
    assert step.run == run.name and step.num_steps == 7
    assert step.plan["architecture"] == plan.architecture.to_dict()
    own = [line["step_seconds"] for line in run.metrics() if line["step"] >= 3]
    assert min(own) <= step.seconds <= max(own)
    assert step.predicted_seconds is None, "nothing was calibrated, so nothing was predicted"
    assert find_residual(plan) is None
