"""Tests of the free memory view: free bytes and processes of GPUs (with a fake pynvml) and of the host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fake_gpus import GIB, TOTAL, pretend_cards
from fake_runs import wait_until
from tests.requirements import sample, thorough

import shardscope as ss
from shardscope.machine.processes import identify_machine, read_start_time
from shardscope.records.folder import RunFolder
from shardscope.records.json_files import write_json
from shardscope.runs.watch import free_memory as free_now_module
from shardscope.runs.watch.free_memory import MAX_USERS, read_free_memory
from shardscope_widgets.run.launching.free_memory import FreeMemoryList


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_active_run(name: str, *, gpus: list[int], pid: int) -> None:
    """Write the folder of an active run whose supervisor is this process."""
    folder = RunFolder(Path("runs") / name)
    folder.create()
    description = {"world_size": 1, "created": time.time(), "machine": identify_machine(), "gpus": gpus}
    write_json(folder.run_json, description, as_is=("machine",))
    supervisor = {"pid": os.getpid(), "started": read_start_time(os.getpid()), "machine": identify_machine()}
    write_json(folder.supervisor, supervisor, as_is=("machine",))
    write_json(folder.rank(0), {"pid": pid})
    folder.set_status("running", "1 rank at work")


def test_reports_free_memory_and_processes_per_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        write_active_run("mine", gpus=[0], pid=424_242)
        users = [(process.pid, 2 * GIB), (424_242, 60 * GIB), (999_999_999, None)]
        pretend_cards(monkeypatch, [10 * GIB, TOTAL], users)
        first, second = read_free_memory()
    finally:
        process.kill()
        process.wait()
    assert (first.name, first.free_bytes, first.total_bytes) == ("GPU 0", 10 * GIB, TOTAL)
    assert first.users[0] == "rank 0 of the run mine, 60.0 GiB", "the largest user comes first"
    assert first.users[1].endswith(f"(process {process.pid}), 2.00 GiB")
    assert first.users[2] == "process 999999999", "a process of another container has no name here"
    assert second.users == ()


def test_long_list_of_processes_is_abbreviated(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cards(monkeypatch, [GIB], [(10**8 + number, GIB) for number in range(20)])
    assert len(read_free_memory()[0].users) == MAX_USERS + 1 and read_free_memory()[0].users[-1] == "16 more"


def test_without_gpus_reports_host_memory_and_active_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    write_active_run("on-cpus", gpus=[], pid=1)
    (host,) = read_free_memory()
    assert host.name == "host memory" and 0 < host.free_bytes < host.total_bytes
    assert host.users == ("the run on-cpus is running",)


def test_view_refreshes_on_request_and_escapes_process_names(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_cards(monkeypatch, [TOTAL, 5 * GIB])
    view = FreeMemoryList()
    view.read_now()
    assert view.value.count("class='ss-place'") == 2 and "5.00 of 79.6 GiB" in view.value
    assert "role='img' aria-label='94 % in use'" in view.value
    pretend_cards(monkeypatch, [TOTAL, 6 * GIB])
    monkeypatch.setattr(free_now_module, "_describe_process", lambda pid: "<img src=x>")
    view.press_button("look")
    assert wait_until(lambda: "6.00 of 79.6 GiB" in view.value)
    pretend_cards(monkeypatch, [GIB], [(5, GIB)])
    view.read_now()
    assert "&lt;img src=x&gt;" in view.value and "<img" not in view.value
    view.close()
    view.read_in_background()  # A late click raises nothing.


@thorough()
def test_view_does_not_import_torch() -> None:
    code = """
import sys
from shardscope_widgets.run.launching.free_memory import FreeMemoryList
FreeMemoryList()
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@sample(1)
@pytest.mark.parametrize("outlive", [False, True])
def test_studio_passes_outlive_kernel_to_launch(monkeypatch: pytest.MonkeyPatch, outlive: bool) -> None:
    from shardscope_widgets import Studio

    launch_options: list[dict[str, Any]] = []

    def launch(plan: ss.Plan, task: Any, **options: Any) -> ss.Run:
        launch_options.append(options)
        raise ValueError(json.dumps(sorted(options)))

    monkeypatch.setattr(ss, "launch", launch)
    studio = Studio()
    if studio.launch.current.plan is None:
        pytest.skip('nothing can be launched here: pip install "shardscope[train]"')
    studio.options.outlive.value = outlive
    studio.launch.button.click()
    assert [options["outlive_kernel"] for options in launch_options] == [outlive]
    studio.close()
