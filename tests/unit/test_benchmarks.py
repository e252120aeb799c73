"""What ``make bench`` measures with: two jobs that take turns, and how far a median can be trusted."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import psutil
import pytest
from benchmarks.side import Side
from benchmarks.spread import spread

BUSY = """
import json, sys, time
def work(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
while True:
    work(float(sys.argv[1]))
    print(json.dumps({"time": time.time()}), flush=True)
"""


@contextmanager
def job(code: str, said: Path) -> Iterator[Side]:
    with said.open("wb") as output:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=output, stderr=output)
    try:
        yield Side(process.pid, said, is_over=lambda: process.poll() is not None, why=said.read_text)
    finally:
        for each in [*psutil.Process(process.pid).children(recursive=True), process]:
            each.kill()
        process.wait()


def busy(seconds: float, folder: Path) -> AbstractContextManager[Side]:
    """A job whose steps take so many seconds of a core; it has a process below it, as a launcher has."""
    inner = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}, '{seconds}'])"
    return job(inner, folder / f"{seconds}.jsonl")


def test_processor_time_of_a_turn_is_that_of_its_steps_alone(tmp_path: Path) -> None:
    with busy(0.02, tmp_path) as short, busy(0.04, tmp_path) as long:
        for side in (short, long):
            side.wait_for(1)
            side.hold()
        pairs = [(short.take_turn(4), long.take_turn(4)) for _ in range(3)]
    for one, other in pairs:
        # On a busy machine a step takes longer by the clock, and no longer of a core.
        assert one.processor_seconds == pytest.approx(0.02, rel=0.25)
        assert other.processor_seconds == pytest.approx(0.04, rel=0.25)
        assert one.step_seconds >= 0.9 * one.processor_seconds


def test_a_held_job_stands_still(tmp_path: Path) -> None:
    with busy(0.01, tmp_path) as side:
        side.wait_for(1)
        side.hold()
        before = (tmp_path / "0.01.jsonl").stat().st_size
        with busy(0.01, tmp_path.parent) as other:
            other.wait_for(5)
        assert (tmp_path / "0.01.jsonl").stat().st_size == before
        assert side.take_turn(2).step_seconds < 1


def test_a_job_that_ends_too_soon_is_told_with_its_last_words(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    side = Side(
        process.pid, tmp_path / "none", is_over=lambda: process.poll() is not None, why=lambda: "no disk"
    )
    with pytest.raises(RuntimeError, match="0 of 3 steps, then: no disk"):
        side.wait_for(3)


@pytest.mark.parametrize("number", (6, 15, 36))
def test_the_interval_has_the_true_median_as_often_as_it_says(number: int) -> None:
    draw, found = random.Random(number), 0
    for _ in range(2000):
        # Skewed, as times are: a median of 1.
        got = spread(draw.lognormvariate(0.0, 0.2) for _ in range(number))
        found += got.low <= 1.0 <= got.high
    assert 0.94 < found / 2000 < 0.99


def test_a_verdict_needs_more_than_noise() -> None:
    assert spread([0.99, 1.0, 1.01]).against(0.98) == "ok"
    assert spread([0.95, 0.96, 0.97]).against(0.98) == "UNDER"
    assert spread([0.8, 0.97, 1.2]).against(0.98) == "unsure"
