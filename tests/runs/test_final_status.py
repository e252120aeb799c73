"""A run ends with the status that its task deserves, whatever becomes of exit codes, output and leftovers."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import run_tasks
import status_tasks as tasks
from run_helpers import list_processes, make_plan, seconds_until
from test_stop import find_supervisor, has_begun
from tests.requirements import few, sample, thorough

from shardscope.core.errors import FieldError
from shardscope.frameworks.accelerate.script import Script
from shardscope.runs.launch.launch import launch
from shardscope.runs.run import Run

pytestmark = pytest.mark.usefixtures("bounded_time", "nothing_left")

PREAMBLE = """
import os, signal, sys, time
sys.path.insert(0, {tests!r})
import run_tasks, status_tasks
from pathlib import Path
from run_helpers import make_plan
from shardscope.runs.launch.launch import launch
folder = Path({folder!r})
"""


def start_kernel(program: str, folder: Path, *before: str, **options: Any) -> subprocess.Popen[str]:
    """A kernel that runs ``program``; ``before``: words of the command line that come first."""
    # One file each: an interpreter that starts must not read what the next kernel is writing.
    script = folder / f"kernel-{len(list(folder.glob('kernel-*.py')))}.py"
    values = {"tests": str(Path(__file__).parent), "folder": str(folder)}
    script.write_text(PREAMBLE.format(**values) + textwrap.dedent(program))
    return subprocess.Popen([*before, sys.executable, str(script)], text=True, **options)


def run_kernel(program: str, folder: Path, *before: str) -> list[str]:
    """The lines that the same prints."""
    kernel = start_kernel(program, folder, *before, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, complaint = kernel.communicate(timeout=150)
    assert kernel.returncode == 0, out + complaint
    return out.splitlines()


ENDS = """
runs = [
    launch(make_plan(1), run_tasks.Fail("raises", rank=0), name="one", folder=folder),
    launch(make_plan(2), run_tasks.Log(), name="returns", folder=folder),
    launch(make_plan(2), run_tasks.Fail("exits_at_once"), name="dies", folder=folder),
]
for run in runs:
    print(run.name, run.wait(120), run.reason, sep=" | ")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs env --ignore-signal, of GNU: run it on Linux")
def test_fault_51_the_status_is_right_with_sigchld_ignored(tmp_path: Path) -> None:
    """The kernel inherited that from whoever started it, and the supervisor from the kernel."""
    one, returns, dies = run_kernel(ENDS, tmp_path, "env", "--ignore-signal=CHLD")
    assert one.startswith("one | failed | rank 0 raised LookupError"), one
    assert returns == "returns | finished | the task returned on every rank"
    assert dies.startswith("dies | failed | rank 1 exited with code 7"), dies


LOSES_ITS_SUPERVISOR = """
run = launch(make_plan(1), status_tasks.leaves_a_child, name="run", folder=folder)
while not run.metrics():
    time.sleep(0.05)
print("begun", flush=True)
while run.status != "lost":
    time.sleep(0.05)
time.sleep(10)
"""


@thorough()
@pytest.mark.skipif(sys.platform != "linux", reason="needs env --ignore-signal, of GNU: run it on Linux")
def test_fault_51_a_killed_supervisor_is_cleaned_up_after_with_sigchld_ignored(tmp_path: Path) -> None:
    kernel = start_kernel(
        LOSES_ITS_SUPERVISOR, tmp_path, "env", "--ignore-signal=CHLD", stdout=subprocess.PIPE
    )
    assert kernel.stdout is not None and kernel.stdout.readline() == "begun\n"
    run = Run.attach(tmp_path / "run")
    child = int(run.metrics()[0]["child"])
    os.kill(find_supervisor(run), 9)
    seconds_until(lambda: not psutil.pid_exists(child), 8)
    seconds_until(lambda: not (run.folder / "tmp").exists(), 8)
    assert run.status == "lost"
    kernel.kill()
    kernel.communicate()


@sample(1)
@pytest.mark.parametrize(
    ("ranks", "first"),
    few([(4, "none"), *((1, harm) for harm in tasks.Output.HARMS)], [(4, "none"), (1, "without_flush")]),
)
def test_fault_52_a_task_without_output_finishes(ranks: int, first: str, tmp_path: Path) -> None:
    run = launch(make_plan(ranks), tasks.Output(first), folder=tmp_path)
    assert run.wait(90) == "finished", run.error
    assert run.reason == "the task returned on every rank"
    assert all(f"rank {rank} speaks" in run.logs(rank) for rank in range(ranks))


@thorough()
def test_fault_52_a_task_without_output_fails_with_its_own_exception(tmp_path: Path) -> None:
    run = launch(make_plan(1), tasks.FailsWithoutOutput("none"), folder=tmp_path)
    assert run.wait(90) == "failed"
    assert run.reason == "rank 0 raised LookupError: after all output was gone"
    assert "LookupError: after all output was gone" in run.logs(0)


CLOSED = """
run = launch(make_plan(), run_tasks.Log(), name="run", folder=folder)
run.wait(100)
endless = launch(make_plan(1), run_tasks.Log(10_000, 0.1), name="endless", folder=folder)
while not endless.metrics():
    time.sleep(0.05)
"""


@pytest.mark.parametrize("closed", few(["<&- >&- 2>&-", "<&-", ">&-", "2>&-", "<&- >&-"], ["<&- >&- 2>&-"]))
def test_fault_54_a_kernel_without_standard_streams(closed: str, tmp_path: Path) -> None:
    """Its runs train, and end with it: the lease is no standard stream of anybody."""
    kernel = start_kernel(CLOSED, tmp_path, "sh", "-c", f'exec "$@" {closed}', "sh")
    assert kernel.wait(150) == 0
    run, endless = Run.attach(tmp_path / "run"), Run.attach(tmp_path / "endless")
    assert run.status == "finished" and len(run.metrics()) == 6, run.reason
    assert endless.wait(10) == "stopped" and endless.reason == "the kernel that launched it ended"


def test_fault_56_leftover_threads_and_processes_do_not_keep_a_run_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDSCOPE_GRACE_SECONDS", "1")
    two = launch(make_plan(2), tasks.leaves_a_thread_and_a_daemon, name="two", folder=tmp_path)
    one = launch(make_plan(1), tasks.leaves_a_thread_and_a_daemon, name="one", folder=tmp_path)
    for run in (one, two):
        assert run.wait(60) == "finished", run.reason
        assert run.reason.startswith("the task returned on every rank; then ended rank "), run.reason
        last = run.world_size - 1
        assert f"rank {last}, which a thread kept alive" in run.reason
        assert "in for_ever" in run.logs(last) and "a thread is still running" in run.logs(last)
        assert run.error is None
    assert ", process " in two.reason
    seconds_until(lambda: not list_processes(tmp_path), 5)


@thorough()
def test_fault_56_a_leftover_daemon_does_not_keep_a_run_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDSCOPE_GRACE_SECONDS", "0.5")
    run = launch(make_plan(2), Daemon(), folder=tmp_path)
    assert run.wait(60) == "finished", run.reason
    assert run.reason.startswith("the task returned on every rank; then ended process "), run.reason


class Daemon:
    """Of the task above only what its first rank does."""

    def __call__(self, ctx: Any) -> None:
        if ctx.rank == 0:
            tasks.leaves_a_thread_and_a_daemon(ctx)


@thorough()
def test_fault_56_a_stop_after_the_end_changes_nothing(tmp_path: Path) -> None:
    run = launch(make_plan(1), tasks.leaves_a_thread_and_a_daemon, folder=tmp_path)
    marker = run.folder / "ranks" / "rank-0.json"
    seconds_until(lambda: marker.exists() and "finished" in marker.read_text(), 60)
    time.sleep(0.2)
    run.stop()
    assert run.wait(10) == "finished"


@sample(1)
@pytest.mark.parametrize("is_first", [True, False], ids=["stop_first", "return_first"])
def test_a_stop_counts_if_it_was_requested_before_the_tasks_returned(is_first: bool, tmp_path: Path) -> None:
    """The supervisor is halted, so that it reads the stop after the task has returned."""
    run = launch(make_plan(1), tasks.returns_for_a_stop_or_a_file, folder=tmp_path)
    seconds_until(run.metrics, 60)
    supervisor = psutil.Process(find_supervisor(run))
    supervisor.suspend()
    try:
        if is_first:
            run.stop()
        else:
            (run.folder / "return").touch()
        marker = run.folder / "ranks" / "rank-0.json"
        seconds_until(lambda: "finished" in marker.read_text(), 30)
        if not is_first:
            run.stop()
    finally:
        supervisor.resume()
    assert run.wait(30) == ("stopped" if is_first else "finished")


@thorough()
def test_fault_56_an_asynchronous_save_is_not_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDSCOPE_GRACE_SECONDS", "2")  # Less than the save takes.
    run = launch(make_plan(1), tasks.leaves_a_save, folder=tmp_path)
    assert run.wait(60) == "finished"
    assert run.reason == "the task returned on every rank"
    assert (run.folder / "saved.bin").stat().st_size == 30 * 2**20


@thorough()
def test_a_crash_after_the_task_returned_is_in_the_reason_of_a_finished_run(tmp_path: Path) -> None:
    run = launch(make_plan(1), tasks.crashes_at_exit, folder=tmp_path)
    assert run.wait(60) == "finished"
    assert run.reason.startswith("the task returned on every rank; later, rank 0 crashed with SIGSEGV")


LAZY: list[tuple[Callable[..., Any], str, str]] = [
    (tasks.asynchronous, "async def asynchronous", "asyncio.run(asynchronous(...))"),
    (tasks.generator, "the generator generator", "for _ in generator(...): pass"),
    (tasks.asynchronous_generator, "async def asynchronous_generator, a generator", "async for _ in"),
    (functools.partial(tasks.asynchronous, ctx=1), "async def asynchronous", "asyncio.run("),
    (functools.partial(functools.partial(tasks.generator), 1), "the generator generator", "for _ in"),
    (tasks.Asynchronous(), "async def Asynchronous.__call__", "asyncio.run("),
    (functools.partial(tasks.Asynchronous()), "async def Asynchronous.__call__", "asyncio.run("),
    (tasks.Asynchronous().generate, "the generator Asynchronous.generate", "for _ in"),
]


@pytest.mark.parametrize(("task", "named", "fix"), LAZY)
def test_fault_57_an_async_or_generator_function_raises_at_launch(
    task: Callable[..., Any], named: str, fix: str, tmp_path: Path
) -> None:
    with pytest.raises(FieldError) as caught:
        launch(make_plan(1), task, folder=tmp_path)
    assert f"launch.task is {named!r}" in str(caught.value) and fix in caught.value.fix
    assert not list(tmp_path.iterdir())


def test_fault_57_an_async_or_generator_script_function_raises_at_launch() -> None:
    with pytest.raises(FieldError, match=r"Script\.source is 'async def asynchronous'"):
        Script(tasks.asynchronous, arguments=(1,))


def test_fault_57_a_returned_coroutine_fails_the_run(tmp_path: Path) -> None:
    run = launch(make_plan(1), tasks.returns_a_coroutine, folder=tmp_path)
    assert run.wait(60) == "failed"
    assert "the task returned the coroutine asynchronous, which never ran" in run.reason


@sample(1)
@pytest.mark.parametrize(
    ("ranks", "task", "reason"),
    [
        (2, tasks.exits_with_0, "rank 1 called sys.exit(0) before its task returned"),
        (1, tasks.exits_with_nothing, "rank 0 called sys.exit() before its task returned"),
    ],
)
def test_fault_61_sys_exit_0_inside_a_task_fails_the_run(
    ranks: int, task: Callable[..., Any], reason: str, tmp_path: Path
) -> None:
    run = launch(make_plan(ranks), task, folder=tmp_path)
    assert run.wait(60) == "failed"
    assert run.reason == reason


LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
run = launch(make_plan(), status_tasks.writes_beyond_the_limit, name="run", folder=folder)
print(run.wait(100), run.reason, sep=" | ")
print(100 < len(run.metrics()) < 4000, 50_000 < (run.folder / "logs" / "rank-0.log").stat().st_size <= 2**16)
"""


@thorough()
def test_fault_61_a_file_size_limit_costs_only_output(tmp_path: Path) -> None:
    """EFBIG, as ENOSPC: what is printed and logged beyond is lost, and the run goes on."""
    status, sizes = run_kernel(LIMITED, tmp_path)
    assert status == "finished | the task returned on every rank"
    assert sizes == "True True"


def supervise_again(run: Run) -> str:
    """Return what a second supervisor of the run says; it exits with a failure."""
    command = [sys.executable, "-P", "-m", "shardscope.runs.launch.supervisor", str(run.folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1, done
    return done.stderr


@thorough()
def test_fault_61_a_second_supervisor_leaves_the_run_alone(plan: Any, tmp_path: Path) -> None:
    run = launch(plan, run_tasks.Log(10_000, 0.1, polite=True), folder=tmp_path)
    seconds_until(lambda: has_begun(run) and run.status == "running")
    supervisor, history = find_supervisor(run), run.history
    assert "already has a running supervisor" in supervise_again(run)
    assert run.status == "running" and run.history == history and find_supervisor(run) == supervisor
    run.stop(checkpoint=True)
    assert run.wait(30) == "stopped"
    assert "was started before" in supervise_again(run)
    assert run.status == "stopped" and find_supervisor(run) == supervisor
