"""Processor time and memory of loading a large trace, in processes of its own, beside others that read it.

``python -m benchmarks.trace_loading MODE FOLDER`` prints one measurement as JSON. The others: msgspec and
orjson, which parse and keep nothing, and Holistic Trace Analysis (HTA), which is none of Shardscope's
dependencies. It is used where ``HTA_PYTHON`` names an interpreter that has it, as after
``python -m venv other && other/bin/pip install HolisticTraceAnalysis``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from shardscope.trace import Trace

Mode = Literal["parse", "orjson", "load", "cache", "hta"]

# Counts the events of the files, of which HTA keeps a part.
_LOAD_WITH_HTA = """
import json, logging, resource, sys
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
def measure():
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)
begin = measure()
traces = TraceAnalysis(trace_dir=sys.argv[1], include_last_profiler_step=True).t
num_events = sum(len(traces.get_trace(rank)) for rank in traces.get_all_traces())
print(json.dumps({"num_events": num_events, "processor_seconds": measure() - begin}))
"""


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


def find_hta() -> str | None:
    """Return the interpreter that has HTA; None if it is not installed."""
    python = os.environ.get("HTA_PYTHON", sys.executable)
    try:
        looked = subprocess.run([python, "-c", "import hta"], check=False, capture_output=True)
    except OSError:
        return None
    return None if looked.returncode else python


def measure(folder: Path, mode: Mode) -> Loading | None:
    """Parse the files and nothing else, or load them; None if the package for it is not installed."""
    command = [sys.executable, "-m", "benchmarks.trace_loading", mode, str(folder)]
    if mode == "orjson" and importlib.util.find_spec("orjson") is None:
        return None
    if mode == "hta":
        python = find_hta()
        if python is None:
            return None
        command = [python, "-c", _LOAD_WITH_HTA, str(folder)]
    peak_bytes = 0
    # Without rounding, which loses a part of short kernels, HTA has the times of the files.
    environment = os.environ | {"HTA_DISABLE_NS_ROUNDING": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as child:
        process = psutil.Process(child.pid)
        while child.poll() is None:
            with contextlib.suppress(psutil.Error):
                tree = [process, *process.children(recursive=True)]
                peak_bytes = max(peak_bytes, sum(each.memory_info().rss for each in tree))
            time.sleep(0.02)
        output = child.stdout.read() if child.stdout else b""
    measured = msgspec.json.decode(output.splitlines()[-1], type=Loading)
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
    elif mode == "orjson":
        import orjson  # not a dependency

        num_events = sum(
            len(orjson.loads(path.read_bytes())["traceEvents"]) for path in sorted(folder.glob("*.json"))
        )
    else:
        num_events = len(Trace.load(folder, cache=mode == "cache"))
    others = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = time.process_time() - begin + others.ru_utime + others.ru_stime
    return Loading(num_events, seconds)


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(_measure_here(sys.argv[1], Path(sys.argv[2]))))
