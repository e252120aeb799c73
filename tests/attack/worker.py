"""The process that opens damaged folders: ``python -m tests.attack.worker``. It may hang, and is killed then.

Reads one JSON object per line, ``{"folder": ..., "calls": [...]}``, and makes these calls. Writes a line
before and after each: ``{"begin": name}``, ``{"end": name, "wrong": words or null, "seconds": ...}``, and
``{"folder": ...}`` after the last call of a folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

MAX_MORE_BYTES = 2**31
"""Address space that all calls may take, beyond that of the imported packages."""


def main() -> None:
    """Serve until stdin ends."""
    # Library output must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    from tests.attack.calls import CALLS, Use

    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + MAX_MORE_BYTES,) * 2)

    def write_line(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    for line in sys.stdin:
        request = json.loads(line)
        use = Use(Path(request["folder"]))
        os.chdir(use.parent.parent)  # Views show ./runs.
        threading.excepthook = use.note_thread_error
        for name in request["calls"]:
            write_line(begin=name)
            started_at, core_wait, cpu_seconds = time.monotonic(), _measure_core_wait(), time.process_time()
            wrong = _find_error(CALLS[name], use)
            if use.thread_errors:
                wrong = wrong or use.thread_errors[0]
                use.thread_errors.clear()
            # Without the time in which other processes had the core.
            own_seconds = time.monotonic() - started_at - (_measure_core_wait() - core_wait)
            write_line(end=name, wrong=wrong, seconds=max(own_seconds, time.process_time() - cpu_seconds))
        write_line(folder=request["folder"])


def _find_error(call: Callable[[Any], None], use: Any) -> str | None:
    """Return what is wrong with the call; None if it answers or raises ``ValueError``."""
    try:
        call(use)
    except ValueError:
        return None
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        own_frames = [frame for frame in frames if f"{os.sep}tests{os.sep}" not in frame.filename] or list(
            frames
        )
        with contextlib.suppress(IndexError):
            where = f" at {Path(own_frames[-1].filename).name}:{own_frames[-1].lineno}"
            return f"{type(error).__name__}: {str(error)[:200]}{where}"
        return type(error).__name__
    return None


def _measure_core_wait() -> float:
    """Return the seconds in which a thread of this process could run and had no core (Linux; 0 elsewhere)."""
    total = 0
    for file in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # The thread has ended.
            total += int(file.read_text().split()[1])
    return total / 1e9


def _address_space() -> int:
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[0]) * resource.getpagesize() if status.exists() else 2**34


if __name__ == "__main__":
    main()
