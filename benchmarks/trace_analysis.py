"""Seconds to analyze a large trace: one of our own fixtures, repeated with shifted times."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

from shardscope.trace import Trace

FIXTURE = Path(__file__).parents[1] / "tests" / "fixtures" / "traces_of_runs" / "fsdp2" / "traces"
NUM_EVENTS = 1_700_000
ANALYSES = (
    "breakdown",
    "steps",
    "idle",
    "collectives",
    "stragglers",
    "kernels",
    "critical_path",
    "launches",
    "summary",
)


class TraceSeconds(NamedTuple):
    """Processor seconds of one trace; other load on the machine does not change them."""

    num_slices: int
    analysis_seconds: dict[str, float]
    """Seconds by method, in this order in one process: later ones find what earlier ones derived."""


def measure(folder: Path, num_events: int = NUM_EVENTS) -> TraceSeconds:
    """Write a trace of about that many events, load it and call every analysis."""
    write_repeated(folder, num_events)
    trace = Trace.load(folder, cache=False)
    seconds: dict[str, float] = {}
    for name in ANALYSES:
        begin_analysis = time.process_time()
        getattr(trace, name)()
        seconds[name] = time.process_time() - begin_analysis
    return TraceSeconds(len(trace), seconds)


def write_repeated(folder: Path, num_events: int) -> None:
    """Write the fixture's ranks with their steps one after the other until there are enough events."""
    ranks = {path.name: json.loads(gzip.decompress(path.read_bytes())) for path in sorted(FIXTURE.iterdir())}
    slices = {name: [e for e in data["traceEvents"] if e["ph"] == "X"] for name, data in ranks.items()}
    num_repeats = -(-num_events // sum(len(events) for events in slices.values()))
    # All ranks are shifted by the same time, so that collectives still match.
    every = [event for events in slices.values() for event in events]
    period = max(e["ts"] + e["dur"] for e in every) - min(e["ts"] for e in every) + 100
    for name, data in ranks.items():
        marks = [e for e in slices[name] if e["name"].startswith("ProfilerStep")]
        numbers = {
            mark["name"]: position for position, mark in enumerate(sorted(marks, key=lambda e: e["ts"]))
        }
        data["traceEvents"] = [
            shift(event, repeat, repeat * period, numbers)
            for repeat in range(num_repeats)
            for event in slices[name]
        ]
        (folder / name.removesuffix(".gz")).write_text(json.dumps(data))


def shift(event: dict[str, Any], repeat: int, by_us: float, numbers: dict[str, int]) -> dict[str, Any]:
    """Return the event at a later time; steps get a number of their own."""
    shifted = event | {"ts": event["ts"] + by_us}
    if event["name"] in numbers:
        shifted["name"] = f"ProfilerStep#{repeat * len(numbers) + numbers[event['name']]}"
    return shifted
