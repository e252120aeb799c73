"""Runs that go well, and launches that are refused before anything starts."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import run_tasks as tasks
from run_helpers import list_processes, make_plan, seconds_until
from tests.requirements import sample, thorough

import shardscope as ss
from shardscope import Architecture, Plan
from shardscope.core.errors import FieldError, refuse
from shardscope.machine.host import count_cores
from shardscope.records.json_files import read_lines
from shardscope.runs import runs
from shardscope.runs.launch import launch as launch_module
from shardscope.runs.launch.launch import launch
from shardscope.runs.run import Run

pytestmark = pytest.mark.usefixtures("bounded_time", "nothing_left")


def test_a_run_finishes_with_metrics_of_both_ranks(plan: Any, tmp_path: Path) -> None:
    before = dict(os.environ)
    run = launch(plan, tasks.collective, folder=tmp_path)
    assert run.status in ("starting", "running")
    assert run.wait(60) == "finished", run.error
    assert dict(os.environ) == before
    metrics = run.metrics()
    assert [m["total"] for m in metrics if "total" in m] == [3.0, 3.0]
    assert {m["rank"] for m in metrics} == {0, 1}
    first = next(m for m in metrics if "nan" in m)
    assert first["step"] == 0 and first["nan"] != first["nan"] and first["inf"] == float("inf")
    assert first["text"] == "ok" and first["nothing"] is None and first["time"] > 0
    assert {m["step"] for m in metrics if "after" in m} == {41}
    settings = next(m for m in metrics if "use_cpu" in m)
    assert settings["use_cpu"] == "1" and settings["python_path"] == os.environ.get("PYTHONPATH")
    assert [m["rank"] for m in run.memory()] == [0, 1]
    assert all(m["peak_memory_bytes"] >= m["memory_bytes"] > 1e7 for m in run.memory())
    engine = run.engine_reports()[1]["engine"]
    assert engine["backend"] == "gloo"
    assert engine["gloo_threads"] == [1, 1]
    assert engine["threads"] == int(os.environ.get("OMP_NUM_THREADS", max(1, count_cores() // 2)))
    assert run.reason == "the task returned on every rank" and run.error is None
    assert run.folder.stat().st_mode & 0o777 == 0o700
    with pytest.raises(
        ValueError, match=r"recorded no trace: profile=True was not set, or it ended .*ctx\.profile"
    ):
        run.trace()
    again = Run.attach(run.folder)
    assert again.status == "finished" and str(again.metrics()) == str(metrics)
    assert [r.name for r in runs(tmp_path)] == [run.name]
    assert Run.attach(tmp_path).folder == run.folder
    run.stop()
    run.stop(checkpoint=True)
    assert run.status == "finished" and not read_lines(run.folder / "control.jsonl")


@thorough()
def test_a_single_rank_has_a_process_group(tmp_path: Path) -> None:
    run = launch(make_plan(1), tasks.collective, name="alone", folder=tmp_path)
    assert run.wait(60) == "finished", run.error
    assert run.folder == tmp_path / "alone"
    assert next(m for m in run.metrics() if "total" in m)["total"] == 1.0
    assert repr(run) == f"Run('alone', finished, '{tmp_path / 'alone'}')"
    again = launch(make_plan(1), tasks.Log(), name="alone", folder=tmp_path)
    assert again.folder == tmp_path / "alone-2"
    with ThreadPoolExecutor(1) as thread:  # In this one playwright's loop may run.
        assert thread.submit(asyncio.run, again.wait_async(60)).result() == "finished"
    assert "hello from rank 0 of 1 on cpu" in again.logs(0)
    with pytest.raises(ValueError, match="rank"):
        again.logs(1)


def test_fault_15_17_27_two_runs_at_once_from_threads(
    plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a process that uses CUDA, which ranks that were forked from it could not."""
    import torch

    monkeypatch.setattr(torch.cuda, "_initialized", True)
    started: list[Run] = []

    def start() -> None:
        started.append(launch(plan, tasks.collective, folder=tmp_path))

    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [run.wait(80) for run in started] == ["finished", "finished"]
    assert torch.cuda.is_initialized()
    assert [m["cuda_in_use"] for run in started for m in run.metrics() if "after" in m] == [False] * 4
    ports = [next(m["port"] for m in run.metrics() if "port" in m) for run in started]
    assert len(set(ports)) == 2 and len({run.folder for run in started}) == 2


def test_fault_06_29_a_notebook_function_without_torch(tmp_path: Path) -> None:
    """The kernel: __main__'s function crosses by value, torch stays out, the wait ends at an interrupt."""
    kernel = tmp_path / "kernel.py"
    kernel.write_text(
        f"""
import os, signal, sys, threading
sys.path.insert(0, {str(Path(__file__).parent)!r})
from run_helpers import make_plan
from shardscope.runs.launch.launch import launch
FACTOR = 21

def train(ctx):
    ctx.log(answer=FACTOR * ctx.world_size)
    while not ctx.should_stop:
        __import__("time").sleep(0.05)

if __name__ == "__main__":
    # As a kernel has it; a test run in the background is started with interrupts ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before = dict(os.environ)
    run = launch(make_plan(), train, folder={str(tmp_path / "runs")!r}, name="mine")
    assert "torch" not in sys.modules and dict(os.environ) == before
    # The supervisor may see the ranks at work some moments after their first words.
    while not run.metrics() or run.status == "starting":
        run.wait(0.1)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        run.wait(30)
        raise SystemExit("the wait did not end")
    except KeyboardInterrupt:
        assert run.status == "running", run.status
    run.stop(checkpoint=True)
    print(run.wait(30), run.metrics()[0]["answer"])
"""
    )
    done = subprocess.run(
        [sys.executable, str(kernel)], check=False, capture_output=True, text=True, timeout=80
    )
    assert done.stdout.split() == ["stopped", "42"], done.stderr


@sample(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_listens_to_other_machines(ranks: int, tmp_path: Path) -> None:
    run = launch(make_plan(ranks), tasks.Log(count=600, seconds=0.1, polite=True), folder=tmp_path)
    seconds_until(lambda: {line["rank"] for line in run.metrics()} == set(range(ranks)))
    addresses = {
        connection.laddr.ip
        for process in list_processes(tmp_path)
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }
    run.stop()
    assert run.wait(30) == "stopped"
    assert addresses == {"127.0.0.1"}


def test_profile_writes_traces_of_both_ranks(plan: Any, tmp_path: Path) -> None:
    import gzip
    import json

    run = launch(plan, tasks.profiles, folder=tmp_path)
    assert run.wait(80) == "finished", run.error
    for rank in (0, 1):
        trace = json.loads(gzip.decompress((run.folder / "traces" / f"rank-{rank}.json.gz").read_bytes()))
        assert trace["distributedInfo"]["rank"] == rank
        named = [
            e
            for e in trace["traceEvents"]
            if e.get("name") == "my step" and e.get("cat") == "user_annotation"
        ]
        assert len(named) == 2
    assert all(m["whole"] > 0 for m in run.metrics())
    assert not (run.folder / "tmp").exists()
    others = {
        str(file): oct(file.stat().st_mode) for file in run.folder.rglob("*") if file.stat().st_mode & 0o77
    }
    assert not others, f"readable by other users: {others}"
    assert (run.folder / "logs" / "launcher.log").is_file()


def test_fault_22_accelerate_and_a_noisy_rank(plan: Any, tmp_path: Path) -> None:
    run = launch(plan, tasks.accelerator, folder=tmp_path)
    noisy = launch(make_plan(1), tasks.prints_a_lot, folder=tmp_path)
    assert run.wait(80) == "finished", run.error
    assert sorted((m["num_processes"], m["device"], m["index"]) for m in run.metrics()) == [
        (2, "cpu:0", 0),
        (2, "cpu:0", 1),
    ]
    assert noisy.wait(80) == "finished", noisy.error
    text = noisy.logs(0)
    assert len(text) <= 64 * 1024 and "red the end" in text and "\x1b" not in text
    assert len(noisy.logs(0, max_bytes=10)) <= 10


@thorough()
def test_no_rank_starts_before_all_have_joined(plan: Any, tmp_path: Path) -> None:
    """One that left at once would close its connection before a slower one has noticed that it was made."""
    run = launch(plan, tasks.LateToJoin(), folder=tmp_path)
    assert run.wait(80) == "finished", run.error
    told = run.metrics()
    assert len(told) == 2
    assert min(m["begun"] for m in told) >= max(m["joined"] for m in told)


def test_fault_16_the_name_of_a_live_run_raises(plan: Any, tmp_path: Path) -> None:
    run = launch(plan, tasks.Log(1000, 0.1), name="same", folder=tmp_path)
    with pytest.raises(ValueError, match=r"'same'.*run\.stop\(\)"):
        launch(plan, tasks.Log(), name="same", folder=tmp_path)
    run.stop()
    assert run.wait(30) == "stopped"


def test_fault_19_the_unpicklable_object_is_named(plan: Any, tmp_path: Path) -> None:
    lock = threading.Lock()

    def train(ctx: Any) -> object:
        return lock

    with pytest.raises(ValueError, match=r"train.*'lock'.*_thread\.lock"):
        launch(plan, train, folder=tmp_path)
    task = tasks.Log()
    task.file = (tmp_path / "x").open("w")  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r": Log\.file, a _io\.TextIOWrapper, cannot be pickled"):
        launch(plan, task, folder=tmp_path)
    task = tasks.Log()
    task.check = lambda plan: refuse("plan", plan, "none", "another")  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"plan is .*allowed: none"):
        launch(plan, task, folder=tmp_path)
    assert runs(tmp_path) == []


def test_fault_21_missing_extra(plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "accelerate" else real(name)
    )
    with pytest.raises(ImportError, match=r'accelerate.*pip install "shardscope\[train\]"'):
        launch(plan, tasks.Log(), folder=tmp_path)


def test_fault_18_more_ranks_than_the_machine_supports(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"plan\.world_size is 1024; allowed: 1 to"):
        launch(make_plan(1024), tasks.Log(), folder=tmp_path)


@pytest.mark.parametrize("plan", [None, 7, "8xh100", Architecture.of_size("2m"), Plan])
def test_a_plan_of_another_type_raises(plan: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"launch\.plan is .*allowed: a Plan"):
        launch(plan, tasks.Log(), folder=tmp_path)


@pytest.mark.parametrize("task", [None, 7, "train", tasks.Log])
def test_a_task_of_another_type_raises(task: Any, plan: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"launch\.task is .*allowed: a callable f\(ctx\)"):
        launch(plan, task, folder=tmp_path)


@pytest.mark.parametrize("folder", [5, True, float("nan"), [], b"runs", "a\0b"])
def test_an_invalid_folder_raises(folder: Any, plan: Any) -> None:
    with pytest.raises(ValueError, match=r"launch\.folder is .*allowed: text or a Path"):
        launch(plan, tasks.Log(), folder=folder)


def test_fault_20_several_machines_and_absent_gpus(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="this machine only"):
        launch(make_plan(4, "2x2xb200-sxm-180gb"), tasks.Log(), folder=tmp_path)
    with pytest.raises(FieldError, match=r"this machine: ") as caught:
        launch(make_plan(2, "2xb200-sxm-180gb"), tasks.Log(), folder=tmp_path)
    found = re.fullmatch(r'cluster=Cluster\.parse\("(.+)"\)', caught.value.fix)
    assert found
    ranks = ss.Cluster.parse(found[1])
    assert ranks.gpu.name == ss.Cluster.detect().gpu.name
    assert ranks.num_gpus <= 2


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "x" * 101, "a\nb", 7])
def test_fault_41_bad_names(name: Any, plan: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"launch\.name"):
        launch(plan, tasks.Log(), name=name, folder=tmp_path)


def test_fault_23_folders_that_cannot_be_written(
    plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="which is a file"):
        launch(plan, tasks.Log(), folder=tmp_path / "file")
    with pytest.raises(OSError, match=r"/proc/runs.*cannot be written.*folder="):
        launch(plan, tasks.Log(), name="x", folder="/proc/runs")

    def raise_disk_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(launch_module, "write_task", raise_disk_full)
    with pytest.raises(OSError, match=r"cannot be written: No space left"):
        launch(plan, tasks.Log(), folder=tmp_path)


def test_no_token_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret_of_the_user")
    run = launch(make_plan(1), tasks.Log(), folder=tmp_path)
    assert run.wait(60) == "finished", run.error
    for file in run.folder.rglob("*"):
        assert not file.is_file() or b"hf_secret" not in file.read_bytes(), file


@thorough()
def test_garbage_collection_of_a_handle_ends_no_run(tmp_path: Path) -> None:
    import gc

    folder = launch(make_plan(1), tasks.Log(20, 0.05), folder=tmp_path).folder
    gc.collect()
    assert Run.attach(folder).wait(60) == "finished"


@pytest.mark.alone
def test_fault_08_a_forked_child_of_the_kernel_holds_no_lease(tmp_path: Path) -> None:
    """A DataLoader worker of the kernel must not keep runs alive after the kernel."""
    kernel = f"""
import os, sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
import run_tasks
from run_helpers import make_plan
from shardscope.runs.launch.launch import launch
launch(make_plan(1), run_tasks.Log(1000, 0.1), name="leased", folder={str(tmp_path)!r})
task = run_tasks.Log(1000, 0.1)
second = launch(make_plan(1), task, name="outlives", folder={str(tmp_path)!r}, outlive_kernel=True)
if os.fork() == 0:
    os.close(1); os.close(2)
    time.sleep(20)
    os._exit(0)
while not second.metrics():
    time.sleep(0.05)
"""
    subprocess.run([sys.executable, "-c", kernel], timeout=80, check=True, capture_output=True)
    leased, outlives = Run.attach(tmp_path / "leased"), Run.attach(tmp_path / "outlives")
    assert leased.wait(6) == "stopped" and "kernel" in leased.reason
    time.sleep(0.5)
    assert outlives.status == "running"
    outlives.stop()
    assert outlives.wait(10) == "stopped"
    for process in list_processes(tmp_path):
        if "-c" in process.cmdline():
            process.kill()


@thorough()
def test_the_supervisor_uses_little_memory(plan: Any, tmp_path: Path) -> None:
    run = launch(plan, tasks.Log(1000, 0.1), folder=tmp_path)
    seconds_until(run.metrics)
    supervisor = next(
        p for p in list_processes(tmp_path) if "shardscope.runs.launch.supervisor" in p.cmdline()
    )
    assert not [m for m in psutil.Process(supervisor.pid).memory_maps() if "libtorch" in m.path]
    run.stop()
    assert run.wait(10) == "stopped"


@thorough()
def test_a_launch_with_the_name_of_a_damaged_run_gets_a_number(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for file in ("run.json", "status.jsonl"):
        (tmp_path / "mine" / file).write_text("{")
    run = launch(make_plan(1), tasks.Log(), name="mine", folder=tmp_path)
    assert run.wait(60) == "finished" and run.name == "mine-2"
