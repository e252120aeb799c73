"""A Python that lacks what macOS, Windows or Pyodide lack, and plans, draws and reads in it what works there.

Run as a program with the value of ``sys.platform`` and the system's name. The current folder is written to.
Third-party packages are imported before anything is removed, for the builds installed here are Linux's.
"""

from __future__ import annotations

import asyncio  # noqa: F401
import concurrent.futures  # noqa: F401
import ctypes
import importlib.metadata  # noqa: F401
import multiprocessing  # noqa: F401
import os
import shutil
import signal
import socket
import subprocess  # noqa: F401
import sys
import tempfile  # noqa: F401
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NoReturn

import anywidget  # noqa: F401
import IPython.display  # noqa: F401
import ipywidgets  # noqa: F401
import msgspec  # noqa: F401
import numpy  # noqa: F401
import pandas.io.formats.style  # noqa: F401
import plotly.graph_objects
import plotly.io  # noqa: F401
import psutil  # noqa: F401
import pynvml  # noqa: F401

FIXTURES = Path(__file__).parents[2] / "fixtures"

# Absent outside Linux: prctl and memfd (ctypes and os), the affinity of processes, real-time signals.
NOT_LINUX = {
    os: ("sched_getaffinity", "waitid", "pipe2", "memfd_create"),
    signal: ("SIGRTMIN", "SIGRTMAX"),
}
NOT_WINDOWS = {
    os: (
        *(
            "fork",
            "forkpty",
            "register_at_fork",
            "getuid",
            "geteuid",
            "getgid",
            "getsid",
            "setsid",
            "getpgid",
        ),
        *("killpg", "mkfifo", "fchmod", "statvfs", "sysconf", "uname", "getloadavg", "nice", "openpty"),
        *("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_DIRECTORY", "O_SYNC", "WNOHANG", "pread", "pwrite"),
    ),
    signal: (
        *("SIGKILL", "SIGHUP", "SIGBUS", "SIGUSR1", "SIGUSR2", "SIGCHLD", "SIGALRM", "SIGSTOP", "SIGCONT"),
        *("pthread_sigmask", "siginterrupt", "setitimer", "sigtimedwait"),
    ),
    socket: ("AF_UNIX",),
}
TRAINING_PACKAGES = {"torch", "transformers", "accelerate"}
UNIX_MODULES = {"fcntl", "resource", "termios", "pwd", "grp", "pty"}


class _MissingModules(MetaPathFinder):
    def __init__(self, names: set[str]) -> None:
        self._names = names

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname.partition(".")[0] in self._names:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


class _WithoutTraining(PathFinder):
    """Finds all packages but those of the ``train`` extra: ``find_spec()`` returns None, as for any that is
    not installed."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        is_missing = fullname.partition(".")[0] in TRAINING_PACKAGES
        return None if is_missing else PathFinder.find_spec(fullname, path, target)


class _NoLibrary:
    def __init__(self, *args: object, **kwargs: object) -> NoReturn:
        raise OSError("no such library")


def become(platform: str) -> None:
    """Remove from this process what ``platform`` does not have."""
    missing: set[str] = set()
    removed = [NOT_LINUX]
    if platform in ("win32", "emscripten"):
        missing |= UNIX_MODULES
    if platform == "emscripten":  # It has no processes.
        missing |= {"psutil", "pynvml"}
    if platform == "win32":
        removed.append(NOT_WINDOWS)
    for name in missing | TRAINING_PACKAGES:
        sys.modules.pop(name, None)
    sys.meta_path[:] = [_WithoutTraining if finder is PathFinder else finder for finder in sys.meta_path]
    sys.meta_path.insert(0, _MissingModules(missing))
    for owner, names in ((owner, names) for table in removed for owner, names in table.items()):
        for name in names:
            if hasattr(owner, name):
                delattr(owner, name)
    if platform == "win32":
        # Of shutil.which, from Python 3.12 on.
        windows = SimpleNamespace(NeedCurrentDirectoryForExePath=lambda command: False)
        shutil._winapi = windows  # type: ignore[attr-defined]
    ctypes.CDLL = _NoLibrary  # type: ignore[assignment, misc]
    sys.platform = platform


def use_what_works(name: str) -> None:
    """Plan, draw, open a trace and a saved run; fail if one of them does, or if a launch does not."""
    import shardscope as ss
    from shardscope.cli.main import main
    from shardscope.timing.calibration.store import remove_traced_rates
    from shardscope_widgets import MemoryView, RunView, ScheduleView, StepView, Studio, TraceView

    plan = ss.Plan(
        ss.models["llama-3.1-8b"],
        ss.Cluster.parse("8xh100-sxm-80gb"),
        ss.Recipe(seq_len=4096, global_batch_size=64),
        ss.Layout.fsdp2(),
    )
    report, step = plan.memory(), plan.step()
    assert report.fits and step.seconds > 0 and report.explain("activations")
    assert ss.Plan.from_json(plan.to_json()) == plan
    assert ss.recommend(plan.architecture, plan.cluster, plan.recipe).why
    assert plan.findings() is not None
    assert plan.export("exported")
    assert ss.Cluster.detect().num_gpus > 0
    assert main(["plan", "exported/plan.json"]) == 0
    remove_traced_rates(plan.cluster.gpu.name)

    studio = Studio()
    assert studio.plan.memory().peak_bytes
    note = studio.launch.current.note
    assert "needs Linux" in note and name in note, note
    for view in (MemoryView(plan), StepView(plan)):
        assert view._repr_mimebundle_()
    pipeline = ss.Plan(plan.architecture, plan.cluster, plan.recipe, ss.Layout.megatron(tp=2, pp=4))
    assert ScheduleView(pipeline).to_html("schedule.html").stat().st_size > 10_000

    trace = ss.Trace.load(FIXTURES / "trace_2_ranks")
    assert "2 ranks" in str(trace.summary())
    assert TraceView(trace).to_html("trace.html").stat().st_size > 10_000
    shutil.copytree(FIXTURES / "formats/stored_runs/fsdp2", "runs/fsdp2")
    run = ss.Run.attach("runs/fsdp2")
    assert run.status == "finished" and run.metrics() and run.plan.memory().peak_bytes, run.status
    assert [other.name for other in ss.runs()] == [run.name]
    RunView(run)

    small = ss.Plan(
        ss.Architecture.of_size("2m"), ss.Cluster.parse("2xcpu"), ss.Recipe(seq_len=64), ss.Layout.ddp()
    )
    for start in (lambda: ss.launch(small, ss.Pretrain(num_steps=1)), ss.calibrate):
        try:
            start()
        except ValueError as error:
            text = str(error)
            assert all(word in text for word in ("needs Linux", name, "WSL 2", "Binder")), text
        else:
            raise AssertionError("launched")
    assert [path.name for path in Path("runs").iterdir()] == [run.name], "nothing was created"


if __name__ == "__main__":
    become(sys.argv[1])
    use_what_works(sys.argv[2])
    # Before 3.14 Python ends the views' daemon threads by pthread_exit, which aborts the process if a C++
    # frame is on the stack of one (gh-87135).
    sys.stdout.flush()
    os._exit(0)
