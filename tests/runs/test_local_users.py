"""Tests of other users of the machine, who cannot reach a run, and of a machine without loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest
import run_tasks as tasks
from run_helpers import list_processes, make_plan, seconds_until
from tests.requirements import few, thorough

from shardscope.runs.launch.launch import launch

pytestmark = pytest.mark.usefixtures("bounded_time", "nothing_left")

is_root = hasattr(os, "geteuid") and os.geteuid() == 0
as_another_user = pytest.mark.skipif(
    not is_root, reason="needs root, to become another user: run it with sudo"
)

STRANGER = """
import json, os, signal, sys
from datetime import timedelta
import torch.distributed as dist

ports, pids = json.loads(sys.argv[1])
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
told = {"stores": [], "files": []}
for port in ports:
    reader, writer = os.pipe()
    if os.fork() == 0:
        signal.alarm(4)  # torch's client waits for ever for the answer of what is no store.
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=2))
        store.set("intruder", "was here")
        os.write(writer, json.dumps([port, store.get("intruder").decode(), store.num_keys()]).encode())
        os._exit(0)
    os.close(writer)
    if answer := os.read(reader, 1000):
        told["stores"].append(json.loads(answer))
for pid in pids:
    for number in range(64):
        try:
            os.close(os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR))
            told["files"].append([pid, number])
        except OSError:
            pass
print(json.dumps(told))
"""


@as_another_user
@pytest.mark.parametrize("ranks", few([1, 2], [1]))
def test_fault_59_another_local_user_reaches_no_store(ranks: int, tmp_path: Path) -> None:
    """Neither the launcher's store nor the ranks' can be reached; the run continues."""
    run = launch(make_plan(ranks), tasks.Sums(), folder=tmp_path)
    seconds_until(lambda: {line["rank"] for line in run.metrics()} == set(range(ranks)))
    processes = list_processes(tmp_path)
    ports = sorted(_find_listening_ports(processes))
    attempt = json.dumps([ports, [process.pid for process in processes]])
    done = subprocess.run(
        [sys.executable, "-c", STRANGER, attempt], check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == {"stores": [], "files": []}, f"of the ports {ports}"
    before = len(run.metrics())
    seconds_until(lambda: len(run.metrics()) > before + 5, timeout=10)
    run.stop(checkpoint=True)
    assert run.wait(30) == "stopped", run.error


def _find_listening_ports(processes: list[psutil.Process]) -> set[int]:
    return {
        connection.laddr.port
        for process in processes
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }


@thorough()
@as_another_user
def test_another_local_user_of_these_tests_reaches_an_open_store() -> None:
    """The user of the test above reaches a store that is open."""
    code = textwrap.dedent("""
        import json, os, subprocess, sys, torch.distributed as dist
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        attempt = json.dumps([[store.port], []])
        done = subprocess.run([sys.executable, "-c", sys.argv[1], attempt], capture_output=True, text=True)
        print(done.stdout, done.stderr[-2000:])
    """)
    done = subprocess.run(
        [sys.executable, "-c", code, STRANGER], check=False, capture_output=True, text=True, timeout=120
    )
    assert '"was here"' in done.stdout


def test_groups_created_by_a_task_need_no_port(plan: Any, tmp_path: Path) -> None:
    run = launch(plan, tasks.makes_its_group_anew, folder=tmp_path)
    assert run.wait(60) == "finished", run.error
    assert [line["total"] for line in run.metrics()] == 2 * [1.0, 1.0]


def test_fault_61_the_loopback_interface_is_down(tmp_path: Path) -> None:
    """The launch runs in its own network namespace, whose loopback is down."""
    kernel = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import run_tasks
from run_helpers import make_plan
from shardscope.runs.launch.launch import launch
for ranks in (1, 2):
    run = launch(make_plan(ranks), run_tasks.Log(), folder={str(tmp_path)!r})
    print(run.wait(30), run.reason)
    run.stop()
    run.wait(30)
"""
    alone = ["unshare", "--net", *([] if is_root else ["--map-root-user"])]
    try:
        able = subprocess.run([*alone, "true"], check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        able = False
    if not able:
        pytest.skip("needs a network namespace: run it as root, or where users may make one")
    done = subprocess.run(
        [*alone, sys.executable, "-c", kernel], check=False, capture_output=True, text=True, timeout=120
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stderr[-2000:]
    for line in lines:
        assert line.startswith("failed the launcher raised OSError: this machine cannot connect to itself"), (
            line
        )
        assert "ip link set lo up" in line
