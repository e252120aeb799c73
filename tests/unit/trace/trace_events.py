"""Events of hand-made and generated traces, in nanoseconds, and the plain reference of their time."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from shardscope.trace import Trace

BASE_NS = 1_700_000_000_000_000_000
COMMUNICATION_NAME = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
Events = list[dict[str, Any]]


def make_slice(
    name: str, start: int, end: int, *, cat: str, pid: int, tid: int, **args: Any
) -> dict[str, Any]:
    """Return one event from ``start`` to ``end``, in nanoseconds."""
    ts, dur = start / 1000, (end - start) / 1000
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


def kernel(start: int, end: int, name: str = "gemm", stream: int = 7, **args: Any) -> dict[str, Any]:
    return make_slice(name, start, end, cat="kernel", pid=0, tid=stream, **args)


def all_reduce(start: int, end: int, stream: int = 20, **args: Any) -> dict[str, Any]:
    return kernel(start, end, COMMUNICATION_NAME, stream, **args)


def copy(start: int, end: int, stream: int = 9, **args: Any) -> dict[str, Any]:
    name = "Memcpy HtoD (Pinned -> Device)"
    return make_slice(name, start, end, cat="gpu_memcpy", pid=0, tid=stream, **args)


def launch(start: int, end: int, correlation: int, tid: int = 100) -> dict[str, Any]:
    return make_slice(
        "cudaLaunchKernel", start, end, cat="cuda_runtime", pid=100, tid=tid, correlation=correlation
    )


def operator(start: int, end: int, name: str = "aten::mm", tid: int = 100, **args: Any) -> dict[str, Any]:
    return make_slice(name, start, end, cat="cpu_op", pid=100, tid=tid, **args)


def annotation(start: int, end: int, name: str, tid: int = 100, **args: Any) -> dict[str, Any]:
    return make_slice(name, start, end, cat="user_annotation", pid=100, tid=tid, **args)


def step(number: int, start: int, end: int) -> dict[str, Any]:
    return annotation(start, end, f"ProfilerStep#{number}")


def write_ranks(folder: Path, ranks: dict[int, Events], **document: Any) -> Path:
    """Write one file a rank, all on one wall clock."""
    folder.mkdir(parents=True, exist_ok=True)
    more = document.pop("info", {})
    for rank, events in ranks.items():
        info = {"rank": rank, "world_size": len(ranks), "backend": "nccl"} | more
        data = {"traceEvents": events, "distributedInfo": info, "baseTimeNanoseconds": BASE_NS, **document}
        (folder / f"rank-{rank}.json").write_text(json.dumps(data))
    return folder


def load_ranks(folder: Path, ranks: dict[int, Events], **document: Any) -> Trace:
    return Trace.load(write_ranks(folder, ranks, **document))


def nanoseconds(events: Iterable[dict[str, Any]]) -> set[int]:
    """Return every nanosecond in which at least one of the events runs: the plainest union there is."""
    covered: set[int] = set()
    for event in events:
        start = round(event["ts"] * 1000)
        covered |= set(range(start, start + round(event["dur"] * 1000)))
    return covered


def to_ns(seconds: float) -> int:
    return round(seconds * 1e9)


@st.composite
def gpu_events(draw: st.DrawFn, limit: int = 300) -> Events:
    """Events of one rank with a GPU: work on several streams, launches, operators, annotations and steps."""

    def draw_times() -> tuple[int, int]:
        start = draw(st.integers(0, limit))
        return start, start + draw(st.integers(0, limit // 4))

    events: Events = [operator(0, limit), kernel(5, 6)]
    makers = draw(st.lists(st.sampled_from([kernel, all_reduce, copy]), max_size=12))
    for correlation, make in enumerate(makers):
        start, end = draw_times()
        stream = draw(st.sampled_from([7, 9, 20]))
        if make is kernel:
            events.append(kernel(start, end, stream=stream, correlation=correlation))
        else:
            events.append(make(start, end, stream, correlation=correlation))
        if draw(st.booleans()):
            launched = draw(st.integers(0, start))
            events.append(launch(launched, launched + draw(st.integers(1, 20)), correlation))
    for name in draw(st.lists(st.sampled_from(["nccl:all_reduce", "DataLoader.__next__", "gloo:barrier"]))):
        events.append(annotation(*draw_times(), name))
    events += _draw_steps(draw, limit)
    return events


@st.composite
def cpu_events(draw: st.DrawFn, limit: int = 300) -> Events:
    """Events of one CPU rank: operators one after the other, and collectives on a thread of gloo."""
    events: Events = []
    for tid in (100, 101):
        now = 0
        for gap, length in draw(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), max_size=6)):
            events.append(operator(now + gap, now + gap + length, "aten::mm", tid))
            now += gap + length
    now = 0
    for gap, length in draw(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 60)), max_size=4)):
        events.append(annotation(now + gap, now + gap + length, "gloo:all_reduce", 200))
        now += gap + length
    return [*events, operator(limit - 2, limit), *_draw_steps(draw, limit)]


def _draw_steps(draw: st.DrawFn, limit: int) -> Events:
    bounds = sorted(draw(st.sets(st.integers(0, limit), max_size=4)))
    return [step(number, a, b) for number, (a, b) in enumerate(pairwise(bounds))]
