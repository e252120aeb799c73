"""Tests of utilization and temperature of a run's GPUs, with a fake driver library."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.requirements import thorough

from shardscope.records.folder import NodeFolder, RunFolder
from shardscope.records.json_files import append_line, read_lines, write_json
from shardscope.runs.watch import gpu_monitor as card_watch
from shardscope.runs.watch.gpu_monitor import GpuSample, GpuSampler, read_gpu_samples
from shardscope.runs.watch.periodic_checks import PeriodicChecks


class NvmlError(Exception):
    pass


def folder_with(tmp_path: Path, gpus: object) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    write_json(folder.run_json, {"world_size": 2, "gpus": gpus})
    return folder


def pretend_driver(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> list[str]:
    """Replace the driver. Return the list of its start and shutdown calls."""
    results: list[str] = []

    def refuse(*_: object) -> None:
        raise NvmlError("Not Supported")

    fake = SimpleNamespace(
        NVMLError=NvmlError,
        nvmlInit=lambda: results.append("init"),
        nvmlShutdown=lambda: results.append("shutdown"),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=90 + handle, memory=0),
        nvmlDeviceGetTemperature=lambda handle, sensor: 60 + handle,
        nvmlDeviceGetPowerUsage=lambda handle: 412_500,
        nvmlDeviceGetMemoryInfo=refuse,
    )
    vars(fake).update(functions)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return results


def wait_until(holds: Callable[[], Any], seconds: float = 10) -> Any:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


def request_samples(watch: GpuSampler, times: int) -> None:
    for count in range(times):
        watch.request_sample()
        assert wait_until(lambda count=count: len(list(read_lines(watch.folder.gpu_samples))) > count)


def test_each_rank_has_the_readings_of_its_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = pretend_driver(monkeypatch)
    folder = folder_with(tmp_path, [5, 3])
    watch = GpuSampler(folder)
    request_samples(watch, 2)
    watch.finish()
    assert wait_until(lambda: told == ["init", "shutdown"]), "asked once, and given back"
    records = read_gpu_samples(folder, [5, 3])
    assert [(r["rank"], r["gpu"], r["utilisation_percent"]) for r in records] == [(0, 5, 95), (1, 3, 93)] * 2
    assert {r["temperature_celsius"] for r in records} == {65, 63}
    assert {r["power_watts"] for r in records} == {412.5}
    assert not any("used_bytes" in r for r in records), "what no card answers is left out"
    assert folder.gpu_samples.stat().st_mode & 0o777 == 0o600


def test_each_node_samples_the_gpus_of_its_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend_driver(
        monkeypatch,
        nvmlDeviceGetCount=lambda: 8,
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}",
    )
    monkeypatch.setattr(card_watch, "NODE_SECONDS", 0.0)
    folder = RunFolder(tmp_path / "run")
    folder.create()
    (folder.path / "nodes").mkdir()
    description = {"world_size": 4, "num_nodes": 2, "gpus": [], "device": "cuda"}
    write_json(folder.run_json, description)
    # The scheduler has given other GPUs to each node; the last one is another job's.
    for node, visible in ((0, "2,3"), (1, "6,7,5")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        part = NodeFolder(folder.path, node, 2)
        part.create_own()
        watch = GpuSampler(part)
        request_samples(watch, 2)
        watch.finish()
        assert part.gpu_samples == folder.path / "nodes" / str(node) / "cards.jsonl"
    assert not folder.gpu_samples.exists()
    records = read_gpu_samples(folder, [])
    assert {(r["node"], r["rank"], r["gpu"], r["utilisation_percent"]) for r in records} == {
        (0, 0, 2, 92),
        (0, 1, 3, 93),
        (1, 2, 6, 96),
        (1, 3, 7, 97),
    }
    assert len(records) == 8 and records == sorted(records, key=lambda record: record["time"])
    # The clock of node 1 is 400 s ahead.
    for rank, ready in enumerate((1000.0, 1000.0, 1400.0, 1400.0)):
        write_json(folder.rank(rank), {"ready": ready})
    corrected = {r["time"] for r in read_gpu_samples(folder, []) if r["node"] == 1}
    assert corrected == {r["time"] - 400 for r in records if r["node"] == 1}
    # CPU ranks have no driver to ask, and files of nodes that the run has not are not read.
    write_json(folder.run_json, {**description, "device": "cpu"})
    assert GpuSampler(NodeFolder(folder.path, 1, 2))._num_node_gpus == 0
    (folder.path / "nodes" / "1").rename(folder.path / "nodes" / "7")
    assert {r["node"] for r in read_gpu_samples(folder, [])} == {0}


def test_a_slow_driver_call_delays_no_other_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answers = threading.Event()

    def sleep_in_driver(handle: int) -> int:
        answers.wait(20)
        return 1000

    pretend_driver(monkeypatch, nvmlDeviceGetPowerUsage=sleep_in_driver)
    folder = folder_with(tmp_path, [0])
    beside = PeriodicChecks(folder, 2, print)
    for _ in range(20):
        beside.check(1.0, is_running=False)
    assert not folder.gpu_samples.exists(), "all looks are over, and the card has said nothing yet"
    answers.set()
    list(beside.finish())


def test_a_run_on_cpu_ranks_calls_no_driver(tmp_path: Path) -> None:
    """The check has its own process, because another test may have imported the library."""
    folder = folder_with(tmp_path, [])
    code = f"""
import sys
import threading
from shardscope.runs.watch.gpu_monitor import GpuSampler
from shardscope.records.folder import RunFolder
folder = RunFolder({str(folder.path)!r})
watch = GpuSampler(folder)
watch.request_sample()
watch.finish()
assert "pynvml" not in sys.modules and not folder.gpu_samples.exists()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("gpus", [None, "0", {"0": 1}, [None, "x"], 7])
def test_damaged_gpu_lists_count_as_no_gpus(tmp_path: Path, gpus: object) -> None:
    assert GpuSampler(folder_with(tmp_path, gpus)).gpus == []


def test_without_a_driver_nothing_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail() -> None:
        raise NvmlError("Driver Not Loaded")

    pretend_driver(monkeypatch, nvmlInit=fail)
    folder = folder_with(tmp_path, [0])
    watch = GpuSampler(folder)
    threads = set(threading.enumerate())
    watch.request_sample()
    assert wait_until(lambda: threads.issuperset(threading.enumerate()))
    watch.request_sample()
    assert not folder.gpu_samples.exists()


@thorough()
def test_the_sample_file_is_bounded_and_keeps_first_and_latest_samples(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(card_watch, "MAX_SAMPLES", 40)
    monkeypatch.setattr(card_watch, "DENSE_SAMPLES", 10)
    pretend_driver(monkeypatch)
    now = map(float, itertools.count())
    monkeypatch.setattr(card_watch, "read_sample", lambda *_: GpuSample(next(now), {"power_watts": [100.0]}))
    folder = folder_with(tmp_path, [0])
    watch = GpuSampler(folder)
    for second in range(300):
        watch.request_sample()
        assert wait_until(lambda second=second: read_times(folder)[-1:] == [second])
    times = read_times(folder)
    assert len(times) <= 40 and times == sorted(times)
    assert times[0] == 0.0 and times[-10:] == [float(second) for second in range(290, 300)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert max(gaps) <= 60, "of each part of the run there is something"
    watch.finish()


def test_a_later_attempt_keeps_the_samples_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(card_watch, "MAX_SAMPLES", 20)
    monkeypatch.setattr(card_watch, "DENSE_SAMPLES", 5)
    folder = folder_with(tmp_path, [0])
    now = itertools.count()
    for attempt in (1, 2):
        watch = GpuSampler(folder.select_attempt(attempt))
        for _ in range(18):
            watch._store(GpuSample(float(next(now)), {"power_watts": [100.0]}))
    times = read_times(folder)
    assert len(times) <= 20 and times[0] == 0.0 and any(0.0 < time < 18.0 for time in times)


def read_times(folder: RunFolder) -> list[float]:
    return [line["time"] for line in read_lines(folder.gpu_samples)]


def test_malformed_lines_are_skipped(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, [0, 1])
    for line in (
        {"power_watts": [1]},
        {"time": "now", "power_watts": [1]},
        {"time": 1.0, "power_watts": 5},
        {"time": 2.0, "power_watts": ["NaN", 7.5], "color": [1, 2]},
    ):
        append_line(folder.gpu_samples, line)
    assert read_gpu_samples(folder, [0, 1]) == [{"time": 2.0, "rank": 1, "gpu": 1, "power_watts": 7.5}]
