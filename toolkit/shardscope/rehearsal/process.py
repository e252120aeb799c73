"""Child process of a rehearsal: start, progress, and termination on request, timeout or memory limit."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING

from shardscope.core.errors import refuse
from shardscope.machine.python_process import build_import_path
from shardscope.rehearsal.result import RehearsedStage, build_report

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.memory.report import MemoryReport

Progress = Callable[[str, float], object]
"""Callback with a text and the fraction done, 0 to 1."""

MAX_BYTES = 4 * 2**30
"""Memory limit of the process: fake tensors need no memory, only torch and the framework's code do."""
NEEDED = ("torch", "transformers")
"""Packages that every rehearsal imports; those of its framework are checked in the process."""
POLL_SECONDS = 0.5
"""Seconds without a line after which memory is checked and the caller's progress is called again."""


class RehearsalError(RuntimeError):
    """Failure of the framework's own code on this plan; the message ends with its error."""


def rehearse(plan: Plan, progress: Progress | None = None, timeout: float = 600.0) -> MemoryReport:
    """Run one training step of ``plan`` on fake tensors in a child process, and return its memory report.

    ``progress(text, fraction)`` is called on this thread; an exception in it, KeyboardInterrupt included,
    ends the process and propagates. Raises ``TimeoutError`` after ``timeout`` seconds, ``MemoryError`` above
    4 GiB, ``RehearsalError`` with the framework's own error, ``ValueError`` for plans that cannot be
    rehearsed, and ``ImportError`` without torch or transformers.
    """
    return build_report(plan, rehearse_stages(plan, progress, timeout))


def rehearse_stages(
    plan: Plan, progress: Progress | None = None, timeout: float = 600.0
) -> list[RehearsedStage]:
    """Return the tensors' bytes only, without the overheads of a report. Raises as :func:`rehearse` does."""
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= 86_400:
        refuse("timeout", timeout, "seconds, more than 0 and at most 86,400", {"timeout": 600.0})
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f'Rehearsing needs {", ".join(missing)}: pip install "shardscope[train]". Planning works without.'
        )
    # One core, no GPU and no download: a rehearsal must not disturb a run on the same machine. The caller's
    # sys.path, because a notebook may have extended it.
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": build_import_path(),
    }
    child = subprocess.Popen(
        [sys.executable, "-m", "shardscope.frameworks.rehearsal_process", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
        encoding="utf-8",
    )
    # Whatever ends the wait, KeyboardInterrupt included, leaves no process behind.
    try:
        return _wait_for_stages(child, plan, progress, timeout)
    finally:
        if child.poll() is None:
            child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout, child.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def _wait_for_stages(
    child: subprocess.Popen[str], plan: Plan, progress: Progress | None, timeout: float
) -> list[RehearsedStage]:
    assert child.stdin and child.stdout and child.stderr
    error_lines: list[str] = []
    lines: queue.Queue[str | None] = queue.Queue()
    # Read both pipes on threads: a child that fills one of them would wait for this process otherwise.
    threading.Thread(target=_read_lines, args=(child.stdout, lines), daemon=True).start()
    threading.Thread(target=_keep_tail, args=(child.stderr, error_lines), daemon=True).start()
    # A child that died at once breaks the pipe; its standard error, reported below, says why.
    with contextlib.suppress(BrokenPipeError):
        child.stdin.write(plan.to_json())
        child.stdin.close()
    latest = ("starting", 0.0)
    for line in _yield_lines(child, lines, time.monotonic() + timeout, timeout):
        if not line and progress is not None:
            # Repeat the latest progress: the callback may end the rehearsal by an exception at any time.
            progress(*latest)
        # Libraries may print to standard output, too.
        if not line.startswith("{"):
            continue
        message = json.loads(line)
        if "progress" in message and progress is not None:
            latest = (str(message["progress"][0]), float(message["progress"][1]))
            progress(*latest)
        elif "stages" in message:
            if progress is not None:
                progress("done", 1.0)
            return [RehearsedStage.from_dict(stage) for stage in message["stages"]]
        elif "error" in message:
            if message["refused"]:
                raise ValueError(message["error"])
            raise RehearsalError(f"{plan.layout.title}: {message['error']}\n{message.get('traceback', '')}")
    # The output ended without a result: the process was killed or failed before it could report an error.
    tail = "".join(error_lines[-20:])
    raise RehearsalError(
        f"the rehearsal process exited with code {child.wait()} and without a result\n{tail}"
    )


def _yield_lines(
    child: subprocess.Popen[str], lines: queue.Queue[str | None], deadline: float, timeout: float
) -> Iterator[str]:
    """Yield the child's lines, and an empty one while there is none.

    Raises ``TimeoutError`` after ``deadline`` and ``MemoryError`` above :data:`MAX_BYTES`.
    """
    while True:
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"the rehearsal took longer than {timeout:g} seconds. Nearest fix: a longer one, such as "
                f"plan.rehearse(timeout={2 * timeout:g})"
            )
        try:
            line = lines.get(timeout=POLL_SECONDS)
        except queue.Empty:
            resident_bytes = _read_resident_bytes(child.pid)
            if resident_bytes > MAX_BYTES:
                raise MemoryError(
                    f"the rehearsal held {resident_bytes / 2**30:.1f} GiB, more than 4"
                ) from None
            yield ""
            continue
        if line is None:
            return
        yield line


def _read_resident_bytes(pid: int) -> int:
    import psutil

    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def _read_lines(pipe: IO[str], lines: queue.Queue[str | None]) -> None:
    with contextlib.suppress(ValueError, OSError):
        for line in pipe:
            lines.put(line)
    lines.put(None)


def _keep_tail(pipe: IO[str], tail: list[str]) -> None:
    with contextlib.suppress(ValueError, OSError):
        for line in pipe:
            tail.append(line)
            # A child that prints without end must not fill this process's memory.
            del tail[:-200]
