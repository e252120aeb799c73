"""Ranks that fail: which one is named, in which words."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import run_tasks as tasks
from jumping_clock import OFFSET
from run_helpers import make_plan, seconds_until
from test_stop import has_begun, rank_pid
from tests.requirements import few, sample, thorough

from shardscope.core.errors import FieldError
from shardscope.records.folder import RunFolder
from shardscope.records.json_files import append_line, read_json, write_json
from shardscope.runs.explain.exceptions import make_exception_record
from shardscope.runs.explain.failure import EXIT, find_first_failure, has_rank_died, looks_like_peer_lost
from shardscope.runs.launch import launcher
from shardscope.runs.launch.launch import launch

pytestmark = pytest.mark.usefixtures("bounded_time", "nothing_left")


CASES = [
    ("raises", "rank 1 raised LookupError: the shard of rank 1 is missing", "in raises"),
    ("unspeakable", "rank 1 raised UnspeakableError: (its text could not be read", "in unspeakable"),
    ("long", "rank 1 raised ValueError: xxxx", "characters left out"),
    ("exits", "rank 1 called sys.exit(3)", "SystemExit: 3"),
    ("exits_at_once", "rank 1 exited with code 7", "rank 1"),
    ("exits_as_if_done", "rank 1 exited with code 0 before its task returned", "rank 1"),
    ("segfaults", "rank 1 crashed with SIGSEGV", "in segfaults"),
    (
        "killed",
        "rank 1 was killed by SIGKILL: the kernel counted no out-of-memory kill",
        "rank 1",
    ),
]
IN_EVERY_TEST = ("unspeakable", "segfaults")
"""The story of a run (test_hanging_run.py) has one that is killed."""


@pytest.mark.parametrize(
    ("how", "reason", "error"), few(CASES, [case for case in CASES if case[0] in IN_EVERY_TEST])
)
def test_fault_10_11_12_13_rank_1_fails_while_rank_0_waits(
    how: str, reason: str, error: str, plan: Any, tmp_path: Path
) -> None:
    run = launch(plan, tasks.Fail(how), folder=tmp_path)
    assert run.wait(60) == "failed"
    assert run.reason.startswith(reason), run.reason
    assert len(run.reason) < 400
    assert run.error is not None and error in run.error and len(run.error) < 70_000


@sample(1)
@pytest.mark.parametrize(
    ("how", "reason"),
    few(
        [
            ("raises", "LookupError"),
            ("exits", "sys.exit(3)"),
            ("killed", "SIGKILL"),
            ("exits_as_if_done", "code 0 before"),
        ],
        [("exits", "sys.exit(3)"), ("exits_as_if_done", "code 0 before")],
    ),
)
def test_fault_12_a_single_rank_fails(how: str, reason: str, tmp_path: Path) -> None:
    run = launch(make_plan(1), tasks.Fail(how, rank=0), folder=tmp_path)
    assert run.wait(60) == "failed"
    assert run.reason.startswith("rank 0 ") and reason in run.reason


def test_fault_10_a_rank_killed_from_outside(plan: Any, tmp_path: Path) -> None:
    run = launch(plan, tasks.Log(10_000, 0.1), folder=tmp_path)
    seconds_until(lambda: has_begun(run))
    os.kill(rank_pid(run, 0), signal.SIGKILL)
    assert run.wait(20) == "failed", run.reason
    assert run.reason.startswith("rank 0 was killed by SIGKILL: "), run.reason
    assert "ran out" not in run.reason, run.reason
    assert run.error is not None and "hello from rank 0" in run.error


@pytest.mark.alone
def test_fault_04_a_rank_fails_while_another_ignores_sigterm(plan: Any, tmp_path: Path) -> None:
    """Left to torch elastic, this takes 30 seconds."""
    run = launch(plan, tasks.raises_beside_deaf, folder=tmp_path)
    seconds_until(run.metrics)
    start = time.monotonic()
    assert run.wait(20) == "failed"
    assert time.monotonic() - start < 15
    assert run.reason == "rank 1 raised LookupError: rank 1 first"


@thorough()
def test_a_task_that_cannot_be_imported_fails_the_run(plan: Any, tmp_path: Path) -> None:
    task = tasks.Log()
    task.preload = ("no_such_module_anywhere",)  # type: ignore[attr-defined]
    run = launch(plan, task, folder=tmp_path)
    assert run.wait(60) == "failed"
    assert "the launcher raised ModuleNotFoundError" in run.reason and "no_such_module" in run.reason


@thorough()
@pytest.mark.parametrize("ranks", few([1, 2], [2]))
def test_fault_14_a_port_taken_between_choosing_and_binding(ranks: int) -> None:
    """Nobody binds it: it is only what MASTER_PORT says. A group that a task makes anew needs none either."""
    code = """
    import os, socket, tempfile
    from shardscope.runs.launch.launcher import _call_notebook_launcher
    from shardscope.runs.launch.rank import _complete_environment
    from shardscope.runs.launch.rendezvous.local_store import use_for_env_rendezvous
    import torch.distributed as dist

    def rank(port, place):
        number = _complete_environment(port)
        assert os.environ["MASTER_PORT"] == str(port) and os.environ["MASTER_ADDR"] == "127.0.0.1"
        use_for_env_rendezvous(place)
        dist.init_process_group("gloo", store=place.connect(), rank=number, world_size=RANKS)
        dist.destroy_process_group()
        for _ in range(2):
            dist.init_process_group("gloo")
            dist.barrier()
            dist.destroy_process_group()
        os.write(1, f"up {port}\\n".encode())

    thief = socket.socket()
    thief.bind(("0.0.0.0", 0))
    thief.listen()
    taken = thief.getsockname()[1]
    _call_notebook_launcher(rank, (), RANKS, taken)
    thief.settimeout(0)
    try:
        print("connected to", thief.accept())
    except BlockingIOError:
        print("was", taken)
    """
    code = textwrap.dedent(code).replace("RANKS", str(ranks))
    environment = {**os.environ, "ACCELERATE_USE_CPU": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=80, env=environment
    )
    words = [line for line in done.stdout.splitlines() if line.startswith(("up", "was", "connected"))]
    assert words and words[-1].startswith("was "), done.stderr
    assert words[:-1] == ranks * [f"up {words[-1].split()[-1]}"]


def test_fault_11_consequences_are_listed_after_the_cause(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    write_json(folder.error(0), {"time": 1.0, "summary": "raised A", "traceback": "a", "peer_lost": True})
    write_json(folder.error(2), {"time": 3.0, "summary": "raised C", "traceback": "c", "peer_lost": False})
    append_line(folder.exits, {"time": 0.5, "rank": 3, "code": -15})
    failure = find_first_failure(folder, 4)
    assert failure is not None and failure.rank == 2
    append_line(folder.exits, {"time": 2.0, "rank": 1, "code": -9})
    failure = find_first_failure(folder, 4)
    assert failure is not None and failure.rank == 1 and "SIGKILL" in failure.reason


def test_fault_25_the_clock_is_set_during_a_run(
    plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of every process is set back and forth by months; the run continues, in order."""
    hook, clock = tmp_path / "hook", tmp_path / "clock"
    hook.mkdir()
    here = str(Path(__file__).parent)
    lines = [
        "import sys",
        f"sys.path.append({here!r})",
        "from jumping_clock import install_clock",
        "install_clock()",
    ]
    (hook / "sitecustomize.py").write_text("\n".join(lines))
    clock.write_text("0")
    monkeypatch.setenv(OFFSET, str(clock))
    monkeypatch.setenv("PYTHONPATH", str(hook))
    run = launch(plan, tasks.fails_across_a_set_clock, folder=tmp_path)
    assert run.wait(60) == "failed"
    logged = [record["time"] for record in run.metrics() if record["rank"] == 0]
    assert max(logged) - min(logged) > 1e7, "the ranks' clock was not set"
    errors = [read_json(RunFolder(run.folder).error(rank)) or {} for rank in (0, 1)]
    assert errors[0]["time"] < errors[1]["time"] and "rank 0 last" in errors[0]["summary"]
    assert run.reason.startswith("rank 1 raised LookupError: rank 1 first"), run.reason
    assert "running" in {record["status"] for record in run.history}


def test_fault_11_a_rank_that_torch_reaped_first_still_ended_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both the watching thread and torch elastic wait for a rank, and only one of them gets its exit code."""
    folder = RunFolder(tmp_path / "run")
    folder.create()

    def raise_child_process_error(*_: object) -> None:
        raise ChildProcessError

    monkeypatch.setattr(os, "waitid", raise_child_process_error)
    launcher._watch_rank(folder, 0, 1)
    assert has_rank_died(folder)
    failure = find_first_failure(folder, 2)
    assert failure is not None and failure.reason.startswith("rank 0 ended before its task returned")
    # What rank 0's death did to rank 1 comes next; only then does elastic tell how rank 0 ended.
    append_line(folder.exits, {"monotonic": time.monotonic() + 1, "rank": 1, "code": -6})
    append_line(folder.exits, {"monotonic": time.monotonic() + 2, "rank": 0, "code": -9})
    failure = find_first_failure(folder, 2)
    assert failure is not None and failure.reason.startswith("rank 0 was killed by SIGKILL")
    write_json(folder.rank(0), {"exit": "finished", "port": 0})
    folder.exits.unlink()
    launcher._watch_rank(folder, 0, 1)
    assert not has_rank_died(folder)


def test_fault_11_the_exit_code_of_a_rank_that_torch_reaped_is_written_at_once(tmp_path: Path) -> None:
    """Not only once the other ranks are gone: a launcher that is ended meanwhile could not any more."""
    code = """
    import multiprocessing, os, sys
    from pathlib import Path
    from shardscope.runs.launch import launcher
    from shardscope.records.folder import RunFolder
    launcher._record_reaped_codes()
    folder = RunFolder(sys.argv[1])
    child = multiprocessing.get_context("fork").Process(target=os._exit, args=(7,))
    child.start()
    child.join()
    launcher._watch_rank(folder, 1, child.pid)
    print(folder.exits.read_text())
    """
    folder = RunFolder(tmp_path / "run")
    folder.create()
    write_json(folder.rank(1), {"port": 0})
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(folder.path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=80,
    )
    assert '"rank": 1, "code": 7' in done.stdout


def test_fault_11_the_launcher_waits_for_the_threads_that_watch_its_ranks(tmp_path: Path) -> None:
    """torch elastic may say that a rank failed before how the others ended is written."""
    folder = RunFolder(tmp_path / "run")
    folder.create()
    launcher._write_exit(folder, 1, -9)
    later = threading.Timer(0.2, launcher._write_exit, (folder, 0, -15))
    later.start()
    assert launcher._read_exit_codes(folder, 2) == {0: -15, 1: -9}
    later.join()
    # One that ended before it said who it is has nobody to watch it.
    started = time.monotonic()
    assert launcher._read_exit_codes(folder, 3) == {0: -15, 1: -9}
    assert time.monotonic() - started < 10


def test_the_first_exit_code_counts_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch elastic reports it again at the end: the rank seemed to have died after its peers."""

    def find_no_space(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder = RunFolder(tmp_path / "run")
    folder.create()
    write_json(folder.rank(1), {"port": 0})
    monkeypatch.setattr(launcher, "append_line", find_no_space)
    launcher._write_exit(folder, 1, None, {"time": 1.0, "monotonic": 1.0})
    launcher._write_exit(folder, 1, -9)
    launcher._write_exit(folder, 1, -15)
    entry = (read_json(folder.rank(1)) or {})[EXIT]
    assert entry == {"time": 1.0, "monotonic": 1.0, "rank": 1, "code": -9}


@thorough()
def test_a_failure_is_logged_without_torchs_compiler() -> None:
    """Which torch imports to write an exception into its log: a failed run would end seconds later."""
    code = """
    import sys, logging, torch
    from shardscope.runs.launch.launcher import use_plain_tracebacks
    use_plain_tracebacks()
    try:
        raise LookupError("why")
    except LookupError:
        logging.getLogger("torch.distributed.elastic.multiprocessing.api").exception("failed")
    print("torch._dynamo" in sys.modules)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True, timeout=80
    )
    assert done.stdout == "False\n"
    assert "Traceback (most recent call last)" in done.stderr and "LookupError: why" in done.stderr


def test_fault_11_errors_of_a_lost_peer_are_recognized() -> None:
    gloo = 'File "torch/distributed/x.py"\nRuntimeError: [gloo/transport/tcp] Connection closed by peer'
    assert looks_like_peer_lost("RuntimeError", gloo)
    # The store on another node (torch/csrc/distributed/c10d/socket.cpp, torch 2.13).
    store = "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed."
    assert looks_like_peer_lost("DistNetworkError", store)
    waited = (
        "    summing.wait()\nRuntimeError: [/__w/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection"
    )
    assert looks_like_peer_lost("RuntimeError", f"{waited} closed by peer [127.0.0.1]:21158.")
    assert looks_like_peer_lost(
        "DistBackendError", "NCCL error: remote process exited or there was a network error"
    )
    assert looks_like_peer_lost("ConnectionResetError", "[Errno 104] Connection reset by peer")
    # It was reported as the reason where it was raised first.
    assert looks_like_peer_lost("OtherRankError", "other ranks could not write their part")
    assert not looks_like_peer_lost("ValueError", "broken pipe in my head")


def test_fault_13_exceptions_without_readable_text() -> None:
    class Worst(BaseException):
        def __str__(self) -> str:
            raise KeyboardInterrupt

    assert "Worst" in make_exception_record(Worst())["summary"]
    record = make_exception_record(ValueError("é" * 2_000_000))
    assert len(record["traceback"]) < 70_000 and len(record["summary"]) <= 300


def test_the_reason_of_a_failure_keeps_the_nearest_fix() -> None:
    long = FieldError("Finetune.data", "rows", "whole rows; " + "line 1 is cut; " * 40, "shorter prompts")
    summary = make_exception_record(long)["summary"]
    assert summary.startswith("raised FieldError: Finetune.data is 'rows'") and len(summary) <= 300
    assert summary.endswith("Nearest fix: shorter prompts.")


def test_the_fix_of_a_full_disk_is_one_that_the_task_has() -> None:
    named = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/runs/mine")
    unnamed = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # As of file.write().
    full = make_exception_record(named)["summary"]
    assert "/runs/mine" in full and "Nearest fix: free some space" in full and "resume" not in full
    assert "resume=" in make_exception_record(named, can_resume=True)["summary"]
    full = make_exception_record(unnamed, can_resume=True)["summary"]
    assert "Nearest fix: free some space" in full and "resume" not in full
    rust = "Error while serializing: I/O error: No space left on device (os error 28)"
    assert "Nearest fix: free some space" in make_exception_record(RuntimeError(rust))["summary"]
    limit = make_exception_record(OSError(errno.ENOSPC, "inotify watch limit reached"))["summary"]
    assert "Nearest fix" not in limit


def _fail_in_worker(text: str) -> RuntimeError:
    return RuntimeError(
        "Caught KeyError in DataLoader worker process 1.\nOriginal Traceback (most recent call last):\n"
        f'  File "rows.py", line 4, in __getitem__\n    raise KeyError("row 7")\n{text}\n'
    )


def test_the_reason_names_what_failed_in_a_worker_of_a_data_loader() -> None:
    record = make_exception_record(_fail_in_worker("KeyError: 'row 7'"))
    assert record["summary"] == (
        "raised RuntimeError: Caught KeyError in DataLoader worker process 1: KeyError: 'row 7'"
    )


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_dev_shm_without_space_is_named(code: int) -> None:
    """The errors of locks and shared tensors name no disk, and those of the run have space."""
    # The C function that raises has no frame.
    lock = compile("raise error", "/usr/lib/python3.11/multiprocessing/synchronize.py", "exec")
    with pytest.raises(OSError, match=os.strerror(code)) as of_lock:
        exec(lock, {"error": OSError(code, os.strerror(code))})
    of_tensor = _fail_in_worker("RuntimeError: unable to allocate shared memory(shm) for file </torch_1>")
    for error in (of_lock.value, of_tensor):
        assert "Nearest fix: make /dev/shm writable" in make_exception_record(error)["summary"]
    of_file = make_exception_record(OSError(code, os.strerror(code), "/runs/mine"))
    assert "/dev/shm" not in of_file["summary"]
