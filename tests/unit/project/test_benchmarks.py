"""Tests of the measurement of ``make bench``: two jobs in turns, and the interval of their median ratio."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from benchmarks.side import Side
from benchmarks.spread import compute_spread
from tests.requirements import thorough

BUSY = """
import json, sys, time
while True:
    end = time.process_time() + float(sys.argv[1])
    while time.process_time() < end:
        pass
    print(json.dumps({"time": time.time()}), flush=True)
"""


@contextmanager
def run_busy_job(seconds: float, folder: Path) -> Iterator[Side]:
    """Run a job whose steps take ``seconds`` of CPU time, in a child process as of a launcher."""
    inner = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}, '{seconds}'])"
    log = folder / f"{seconds}.jsonl"
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-c", inner], stdout=output, stderr=output)
    try:
        yield Side(process.pid, log, is_over=lambda: process.poll() is not None, why=log.read_text)
    finally:
        for each in [*psutil.Process(process.pid).children(recursive=True), process]:
            each.kill()
        process.wait()


@thorough()
def test_alternating_jobs_yield_the_ratio_of_their_cpu_times(tmp_path: Path) -> None:
    with run_busy_job(0.02, tmp_path) as short, run_busy_job(0.04, tmp_path) as long:
        for side in (short, long):
            side.wait_for(1)
            side.hold()
        pairs = [(short.take_turn(4), long.take_turn(4)) for _ in range(3)]
    ratio = compute_spread(other.processor_seconds / one.processor_seconds for one, other in pairs)
    # On a busy machine a step takes more wall-clock time, but not more CPU time.
    assert ratio.median == pytest.approx(2, rel=0.25)
    assert ratio.low <= ratio.median <= ratio.high
    assert ratio.against(1.0) == "ok" and ratio.against(4.0) == "UNDER"
