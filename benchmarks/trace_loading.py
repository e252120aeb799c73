"""Processor time and memory of loading a large trace, in processes of its own, beside a bare parse.

``python -m benchmarks.trace_loading MODE FOLDER`` prints one measurement as JSON.
"""

from __future__ import annotations

import contextlib
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from shardscope.trace import Trace

Mode = Literal["parse", "load", "cache"]


class Loading(msgspec.Struct):
    """One load in a fresh process; other load on the machine does not change processor seconds."""

    num_events: int
    processor_seconds: float
    """Of the process and of those that it started."""
    peak_bytes: int = 0
    """Largest sum over the process and those that it started at one time, looked at every 20 ms."""


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    name: str = ""
    cat: str = ""
    ts: float | None = None
    dur: float | None = None
    pid: int | str = ""
    tid: int | str = ""
    args: msgspec.Raw = msgspec.Raw(b"")


class _Document(msgspec.Struct):
    traceEvents: list[_Event]  # noqa: N815 - Chrome's spelling


def measure(folder: Path, mode: Mode) -> Loading:
    """Parse the files with msgspec and nothing else, or load them, without a cache or with one."""
    command = [sys.executable, "-m", "benchmarks.trace_loading", mode, str(folder)]
    peak_bytes = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        process = psutil.Process(child.pid)
        while child.poll() is None:
            with contextlib.suppress(psutil.Error):
                tree = [process, *process.children(recursive=True)]
                peak_bytes = max(peak_bytes, sum(each.memory_info().rss for each in tree))
            time.sleep(0.02)
        output = child.stdout.read() if child.stdout else b""
    measured = msgspec.json.decode(output, type=Loading)
    measured.peak_bytes = peak_bytes
    return measured


def _measure_here(mode: str, folder: Path) -> Loading:
    begin = time.process_time()
    if mode == "parse":
        # File by file, as nothing of a file is kept.
        num_events = sum(
            len(msgspec.json.decode(path.read_bytes(), type=_Document).traceEvents)
            for path in sorted(folder.glob("*.json"))
        )
    else:
        num_events = len(Trace.load(folder, cache=mode == "cache"))
    others = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = time.process_time() - begin + others.ru_utime + others.ru_stime
    return Loading(num_events, seconds)


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(_measure_here(sys.argv[1], Path(sys.argv[2]))))
