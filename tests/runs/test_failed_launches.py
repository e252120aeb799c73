"""A launch that does not come about leaves no file and no process, and names the cause."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import run_tasks as tasks
from run_helpers import list_processes, make_plan, seconds_until
from test_final_status import start_kernel
from tests.faults import includes_slow_tests
from tests.requirements import few, thorough

from shardscope.records import json_files as records
from shardscope.runs import run_status, runs
from shardscope.runs.backends import this_machine
from shardscope.runs.launch import launch as launch_module
from shardscope.runs.launch import lease
from shardscope.runs.launch.launch import launch
from shardscope.runs.run import Run

pytestmark = pytest.mark.usefixtures("bounded_time", "nothing_left")

ENDLESS = tasks.Log(10_000, 0.05)


class NoDescriptors:
    """While it lasts this process can open ``left`` files."""

    def __init__(self, left: int = 0) -> None:
        self.left = left

    def __enter__(self) -> None:
        self.before = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = {int(path.name) for path in Path("/proc/self/fd").iterdir()}
        limit = next(n for n in range(2**16) if sum(one not in used for one in range(n)) >= self.left)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, self.before[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, self.before)


def check_nothing_left(folder: Path, before: set[int]) -> None:
    """Nothing of a launch in ``folder``: no file, no process, no lease but those of ``before``."""
    assert not list(folder.iterdir())
    seconds_until(lambda: not list_processes(folder), 5)
    seconds_until(lambda: lease._leases.write_ends <= before, 5)


@pytest.fixture
def lease_descriptors() -> Iterator[set[int]]:
    yield set(lease._leases.write_ends)


@pytest.mark.skipif(sys.platform != "linux", reason="sees processes in /proc: run it on Linux")
def test_fault_53_a_run_trains_on_while_its_kernel_has_no_free_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_status, "START_GRACE_SECONDS", 0.2)
    run = launch(make_plan(1), ENDLESS, folder=tmp_path)
    seconds_until(lambda: run.status == "running")
    time.sleep(0.3)
    with NoDescriptors():
        assert run.wait(1.0) == "running"
        assert run.reason.startswith("1 rank at work; status possibly outdated: ")
        assert "no free file descriptor" in run.reason
        with pytest.raises((ValueError, OSError), match=r"no free file descriptor|Too many open files"):
            Run(run._folder)
        with pytest.raises(OSError, match="no free file descriptor") as caught:
            run.stop()
        assert "folder=" not in str(caught.value)
    assert (run.status, run.reason) == ("running", "1 rank at work")
    run.stop()
    assert run.wait(30) == "stopped"


@pytest.mark.parametrize("left", few(range(14), [0, 1, 4, 7]))
def test_fault_61_a_launch_without_free_descriptors(
    left: int, tmp_path: Path, lease_descriptors: set[int]
) -> None:
    """Whatever number is left, it launches or leaves nothing, and does not blame the folder."""
    try:
        with NoDescriptors(left):
            run = launch(make_plan(1), ENDLESS, folder=tmp_path)
    except OSError as error:
        # The system's words, of a file that a check reads before anything is made, do as well.
        assert "no free file descriptor" in str(error) or "Too many open files" in str(error), error
        assert "cannot be written" not in str(error)
        check_nothing_left(tmp_path, lease_descriptors)
    else:
        run.stop()
        assert run.wait(60) == "stopped"


SHORTAGES = [
    (errno.ENOMEM, "no free memory"),
    (errno.EAGAIN, "no other process or thread may be started"),
    (errno.EMFILE, "no free file descriptor"),
]


@pytest.mark.parametrize(("number", "words"), SHORTAGES)
def test_fault_61_a_supervisor_that_cannot_be_started(
    number: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lease_descriptors: set[int]
) -> None:
    def refuse_to_start(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(subprocess, "Popen", refuse_to_start)
    with pytest.raises(OSError, match=words) as caught:
        launch(make_plan(1), ENDLESS, folder=tmp_path / "new" / "runs")
    assert caught.value.errno == number and "cannot be written" not in str(caught.value)
    check_nothing_left(tmp_path, lease_descriptors)


@pytest.mark.parametrize("executable", ["/nowhere/bin/python", ""])
def test_fault_61_a_deleted_interpreter(
    executable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lease_descriptors: set[int]
) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(OSError, match=r"Python cannot be started from /nowhere|sys\.executable") as caught:
        launch(make_plan(1), ENDLESS, folder=tmp_path)
    assert "cannot be written" not in str(caught.value)
    check_nothing_left(tmp_path, lease_descriptors)


def test_fault_61_a_launcher_that_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor's interpreter is gone when it starts the launcher."""
    site, folder = tmp_path / "site", tmp_path / "runs"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import sys\nif 'shardscope.runs.launch.supervisor' in sys.orig_argv: "
        "sys.executable = '/nowhere/python'\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(site))
    run = launch(make_plan(1), ENDLESS, folder=folder)
    assert run.wait(30) == "failed"
    assert run.reason == "the launcher was not started: /nowhere/python: No such file or directory"


def break_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse_to_start(thread: threading.Thread) -> None:
        if thread.name.startswith("shardscope-lease"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_to_start)


def break_supervisor_record(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, *more: Any, **options: Any) -> None:
        if path.name == "supervisor.json":
            raise OSError(errno.EMFILE, "Too many open files")
        records.write_json(path, *more, **options)

    monkeypatch.setattr(this_machine, "write_json", fail)


def break_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(launch_module, "Run", fail)


@pytest.mark.parametrize("harm", [break_threads, break_supervisor_record, break_handle])
def test_fault_61_a_launch_that_raises_leaves_nothing(
    harm: Callable[[pytest.MonkeyPatch], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lease_descriptors: set[int],
) -> None:
    """Whatever raises after the supervisor was started."""
    harm(monkeypatch)
    with pytest.raises((OSError, MemoryError)) as caught:
        launch(make_plan(1), ENDLESS, folder=tmp_path, outlive_kernel=harm is break_handle)
    assert "cannot be written" not in str(caught.value)
    check_nothing_left(tmp_path, lease_descriptors)


class Interrupt:
    """Sends this process a real SIGINT at the ``wanted``-th line of the launch that is executed."""

    FILES = (
        *("launch.py", "pending_run.py", "this_machine.py", "lease.py", "folder.py"),
        *("records/json_files.py", "packing.py", "run.py", "subprocess.py"),
    )

    def __init__(self, wanted: int) -> None:
        self.wanted, self.num_lines = wanted, 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.endswith(self.FILES):
            return None
        if event == "line":
            self.num_lines += 1
            if self.num_lines == self.wanted:
                os.kill(os.getpid(), signal.SIGINT)
        return self

    def __enter__(self) -> Interrupt:
        self.handler = signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.settrace(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        signal.signal(signal.SIGINT, self.handler)


def test_fault_61_ctrl_c_inside_launch_leaves_nothing(tmp_path: Path, lease_descriptors: set[int]) -> None:
    """At points evenly spread over all lines that a launch executes, to the last one."""
    for _ in range(2):  # The first one imports, so it executes more lines than those after it.
        with Interrupt(-1) as interrupt:
            run = launch(make_plan(1), ENDLESS, folder=tmp_path / "runs")
        run.stop()
        run.wait(60)
    total, num_points = interrupt.num_lines, 60 if includes_slow_tests() else 12
    num_whole = 0
    for point in range(num_points):
        folder, run = tmp_path / f"runs-{point}", None
        with (
            contextlib.suppress(KeyboardInterrupt),
            Interrupt(total - point * total // num_points) as interrupt,
        ):
            run = launch(make_plan(1), ENDLESS, folder=folder)
        if run is not None:
            # It executed fewer lines: its supervisor was quicker to write a record, so launch wrote none.
            assert interrupt.num_lines < interrupt.wanted
            num_whole += 1
            run.stop()
            run.wait(60)
            continue
        assert not folder.exists(), f"point {point}: {list(folder.rglob('*'))}"
        seconds_until(lambda folder=folder: not list_processes(folder), 5)
    assert num_whole <= num_points // 10
    seconds_until(lambda: lease._leases.write_ends <= lease_descriptors, 5)


@thorough()
def test_fault_61_threads_that_launch_one_name_at_the_same_instant(tmp_path: Path) -> None:
    barrier, results = threading.Barrier(3), []

    def start() -> None:
        barrier.wait()
        try:
            results.append(launch(make_plan(1), ENDLESS, name="exp", folder=tmp_path))
        except ValueError as error:
            results.append(error)

    threads = [threading.Thread(target=start) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check_one_launched(tmp_path, [str(result) for result in results if isinstance(result, ValueError)], 2)


def check_one_launched(folder: Path, refusals: list[str], count: int) -> None:
    assert len(refusals) == count, refusals
    assert all("launch.name is 'exp', which a run still has" in refusal for refusal in refusals)
    assert [path.name for path in folder.iterdir() if path.is_dir()] == ["exp"]
    (run,) = runs(folder)
    seconds_until(run.metrics)
    run.stop()
    assert run.wait(30) == "stopped"


SAME_NAME = """
print("ready", flush=True)
input()
try:
    run = launch(make_plan(1), run_tasks.Log(10_000, 0.05), name="exp", folder=folder / "runs")
    run.wait(60)
except ValueError as error:
    print(error)
"""


def test_fault_61_processes_that_launch_one_name_at_the_same_instant(tmp_path: Path) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    kernels = [start_kernel(SAME_NAME, tmp_path, **pipes) for _ in range(3)]
    for kernel in kernels:
        assert kernel.stdout is not None and kernel.stdout.readline() == "ready\n"
    for kernel in kernels:
        assert kernel.stdin is not None
        kernel.stdin.write("\n")
        kernel.stdin.flush()
    seconds_until(lambda: sum(kernel.poll() is not None for kernel in kernels) == 2, 60)
    refusals = [kernel.communicate()[0] for kernel in kernels if kernel.poll() is not None]
    check_one_launched(tmp_path / "runs", refusals, 2)
    for kernel in kernels:
        kernel.communicate(timeout=60)
