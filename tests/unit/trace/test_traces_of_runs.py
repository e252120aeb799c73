"""Tests of analyses of our own two-rank runs and of others' traces, against a plain reading of the files."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from benchmarks import trace_analysis
from tests.requirements import sample, thorough

from shardscope.trace import Trace
from shardscope_widgets.trace.analyses import describe_collectives

RUNS = Path(__file__).parents[2] / "fixtures" / "traces_of_runs"
# An optional folder of data beside the clone, which CI machines do not have.
BESIDE_THE_REPOSITORY = Path(__file__).parents[4] / "shared" / "data" / "traces"
REAL = Path(os.environ.get("SHARDSCOPE_REAL_TRACES") or BESIDE_THE_REPOSITORY)
Pairs = list[tuple[int, int]]


def unite(pairs: Pairs) -> Pairs:
    """Return the union of intervals, one after the other."""
    merged: list[list[int]] = []
    for start, end in sorted(pairs):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return [(start, end) for start, end in merged]


def measure(pairs: Pairs) -> int:
    return sum(end - start for start, end in unite(pairs))


class PlainRank(NamedTuple):
    """One rank's file, read with ``json`` and no more."""

    num_steps: int
    span: int
    compute: Pairs
    communication: Pairs
    calls: Counter[str]


def read_events(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    document = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    events = [
        event for event in document["traceEvents"] if event.get("ph") == "X" and event["cat"] != "Trace"
    ]
    first = min(round(event["ts"] * 1000) for event in events)
    for event in events:
        event["start"] = round(event["ts"] * 1000) - first
        event["end"] = event["start"] + round(event["dur"] * 1000)
    return events


def read_plainly(path: Path) -> PlainRank:
    events = read_events(path)
    marks = sorted((e for e in events if e["name"].startswith("ProfilerStep")), key=lambda e: e["start"])
    begin, end = marks[0]["start"], marks[-1]["end"]

    def clip(found: list[dict[str, Any]]) -> Pairs:
        return [(max(e["start"], begin), min(e["end"], end)) for e in found]

    collectives = [e for e in events if e["name"].startswith("gloo:")]
    # Operators with a namespace on the training thread; gloo's own thread is part of the collective.
    operators = [
        e for e in events if e["tid"] == marks[0]["tid"] and re.match(r"aten::|fsdp::|torch::dist", e["name"])
    ]
    return PlainRank(
        len(marks), end - begin, clip(operators), clip(collectives), Counter(e["name"] for e in collectives)
    )


@pytest.mark.parametrize("framework", ["ddp", "fsdp2", "zero3", "megatron"])
def test_summaries_of_our_runs_are_true(framework: str) -> None:
    """Steps, shares, calls and waiting of each sentence are those of a plain reading of the files."""
    trace = Trace.load(RUNS / framework)
    plain = [read_plainly(RUNS / framework / "traces" / f"rank-{rank}.json.gz") for rank in range(2)]
    size, shares, *causes = trace.summary().sentences
    assert size.startswith(f"2 ranks, {plain[0].num_steps} steps of ")
    computes = [100 * measure(one.compute) / one.span for one in plain]
    works = [100 * measure(one.compute + one.communication) / one.span for one in plain]
    expected = {
        "compute": computes,
        "exposed communication": [work - compute for work, compute in zip(works, computes, strict=True)],
        "idle": [100 - work for work in works],
    }
    for title, values in expected.items():
        stated = re.search(rf"(\d+)(?: to (\d+))? % {title}", shares)
        assert stated is not None, (title, shares)
        low, high = int(stated[1]), int(stated[2] or stated[1])
        # Names of operators differ a little between both readings: a point is allowed.
        assert abs(low - min(values)) <= 1 and abs(high - max(values)) <= 1, (title, values, shares)
    for name, count in plain[0].calls.items():
        kind = name.removeprefix("gloo:").replace("_", "-")
        calls = count // plain[0].num_steps
        sentence = next((text for text in causes if text.startswith(f"Exposed {kind}")), None)
        # Kinds that take less than 2 % of the step have no sentence.
        assert sentence is None or re.search(rf"in {calls} calls?", sentence), sentence


@pytest.mark.parametrize(
    ("framework", "axis", "calls"),
    [
        # Gradients in one bucket, the stop command, the loss; and buffers once a forward.
        ("ddp", "dp", {"all_reduce": 3, "broadcast": 1}),
        # Root once (kept after forward), the layer in forward and backward. gloo reduces and scatters by an
        # all-reduce: two groups of gradients, the norm, the stop command, the loss.
        ("fsdp2", "dp", {"all_gather": 3, "all_reduce": 5}),
        ("zero3", "dp", {"all_gather": 11, "all_reduce": 5}),
        ("megatron", "tp", {"all_gather": 19, "all_reduce": 23}),
    ],
)
def test_collectives_of_our_runs(framework: str, axis: str, calls: dict[str, int]) -> None:
    trace = Trace.load(RUNS / framework)
    rows = trace.collectives()
    assert {row["axis"] for row in rows} == {axis}
    assert {row["kind"]: row["num_calls"] for row in rows.sum_by_axis()} == calls
    # Both ranks recorded all calls, so each has its transfer time and one rank that did not wait.
    by_call: dict[int, list[float]] = {}
    for row in rows:
        assert row["skew_seconds"] is not None
        by_call.setdefault(row["call"], []).append(row["skew_seconds"])
    assert all(len(skews) == 2 and min(skews) == 0 for skews in by_call.values())
    assert rows.what_if(axis).gain_seconds > 0


@pytest.mark.parametrize("lost", ["request", "call", "end"])
@pytest.mark.parametrize("framework", ["ddp", "fsdp2", "zero3"])
def test_a_rank_that_lost_a_few_events_is_still_compared(tmp_path: Path, framework: str, lost: str) -> None:
    """One request or call more on a rank, or no end of its file, leaves the other collectives known."""
    shutil.copytree(RUNS / framework, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "traces" / "rank-1.json.gz"
    text = gzip.decompress(path.read_bytes())
    if lost == "end":
        text = text[: len(text) * 7 // 10]
    else:
        document = json.loads(text)
        name = "gloo:all_reduce" if lost == "call" else r"c10d::(allreduce_|_reduce_scatter)"
        events = document["traceEvents"]
        del events[next(i for i, event in enumerate(events) if re.match(name, event.get("name", "")))]
        text = json.dumps(document).encode()
    path.write_bytes(gzip.compress(text))
    trace, complete = Trace.load(tmp_path), Trace.load(RUNS / framework)
    rows = trace.collectives()
    assert {row["axis"] for row in rows} == {"dp"}
    assert sum(row["transfer_seconds"] is not None for row in rows) >= 0.85 * len(complete.collectives())
    if lost != "call":
        delays, expected = ([row["late_seconds"] for row in one.stragglers()] for one in (trace, complete))
        # Operators that the end of a file had also show for how long its rank waited.
        assert delays == pytest.approx(expected, rel=0.02 if lost == "end" else 1e-9, abs=1e-4)


def test_bytes_of_gathered_parameters_are_those_of_the_model() -> None:
    """FSDP2's root group: embedding, head and final norm, in fp32; and the one layer."""
    rows = [row for row in Trace.load(RUNS / "fsdp2").collectives() if row["kind"] == "all_gather"]
    root = 4 * (2 * 2048 * 64 + 64)
    layer = 4 * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128 + 2 * 64)
    assert {row["num_bytes"] for row in rows} == {root, layer}


@pytest.mark.parametrize("framework", ["ddp", "fsdp2", "zero3", "megatron"])
def test_every_table_of_our_runs_adds_up(framework: str) -> None:
    trace = Trace.load(RUNS / framework)
    for row in (*trace.breakdown(), *trace.steps()):
        parts = ("compute_seconds", "exposed_communication_seconds", "copy_seconds", "idle_seconds")
        assert sum(row[part] for part in parts) == pytest.approx(row["span_seconds"], abs=1e-12)  # type: ignore[literal-required]
    path = trace.critical_path()
    assert path.seconds == pytest.approx(
        path[-1]["start_seconds"] + path[-1]["seconds"] - path[0]["start_seconds"]
    )
    assert trace.plan is not None and trace.plan.layout.framework in ("ddp", "fsdp2", "deepspeed", "megatron")
    assert any(row["kind"] == "matmul" and row["tflops"] for row in trace.kernels())


GPU_TRACES = (
    "dlrm_8rank",
    "nccl_parser_config__nccl_data.json.gz",
    "timeline_analysis__sampled_rank-0.json.gz",
    "trace_filter__sampled_rank-1.json.gz",
    "trace_diff__control__control.json.gz",
)


@sample(1)
@pytest.mark.parametrize("name", GPU_TRACES)
def test_real_gpu_traces_have_the_reference_breakdown(name: str) -> None:
    """All integers: unions of kernels on GPU streams, by a plain loop over the file."""
    if not (REAL / name).exists():
        pytest.skip("no traces of others here; set SHARDSCOPE_REAL_TRACES to a folder of them")
    trace = Trace.load(REAL / name)
    files = sorted((REAL / name).iterdir()) if (REAL / name).is_dir() else [REAL / name]
    for row, path in zip(trace.breakdown(), files, strict=True):
        events = read_events(path)
        kernels = [e for e in events if e["cat"] == "kernel"]
        communication = [(e["start"], e["end"]) for e in kernels if "nccl" in e["name"].lower()]
        compute = [(e["start"], e["end"]) for e in kernels if "nccl" not in e["name"].lower()]
        copies = [(e["start"], e["end"]) for e in events if e["cat"] in ("gpu_memcpy", "gpu_memset")]
        span = max(e["end"] for e in events)
        busy = measure(compute + communication)
        assert round(row["compute_seconds"] * 1e9) == measure(compute)
        assert round(row["communication_seconds"] * 1e9) == measure(communication)
        assert round(row["exposed_communication_seconds"] * 1e9) == busy - measure(compute)
        assert round(row["copy_seconds"] * 1e9) == measure(compute + communication + copies) - busy
        assert round(row["idle_seconds"] * 1e9) == span - measure(compute + communication + copies)
        assert round(row["span_seconds"] * 1e9) == span


@thorough()
def test_every_real_trace_has_every_analysis() -> None:
    if not REAL.is_dir():
        pytest.skip("no traces of others here; set SHARDSCOPE_REAL_TRACES to a folder of them")
    for path in sorted(REAL.iterdir()):
        if path.suffix == ".md" or path.name.startswith("mtia"):  # 450,000 events: by hand
            continue
        trace = Trace.load(path)
        assert len(trace.summary().sentences) >= 3, path
        assert trace.critical_path().seconds > 0, path
        assert trace.diff(trace)[0]["difference_seconds"] == 0, path


def test_a_repeated_trace_has_the_same_steps_again(tmp_path: Path) -> None:
    """The trace of ``make bench``: every step is there again, and collectives match across ranks."""
    one = Trace.load(RUNS / "fsdp2")
    trace_analysis.write_repeated(tmp_path, 4 * len(one))
    repeated = Trace.load(tmp_path)
    assert len(repeated) == 4 * len(one) and len(repeated.steps()) == 4 * len(one.steps())
    for row, again in zip(one.breakdown(), repeated.breakdown(), strict=True):
        for part in ("compute_seconds", "communication_seconds", "overlapped_seconds"):
            assert round(1e9 * again[part]) == pytest.approx(4 * round(1e9 * row[part]), abs=len(repeated))
    rows, rows_again = one.collectives(), repeated.collectives()
    assert len(rows_again) == 4 * len(rows)
    assert all(row["transfer_seconds"] is not None for row in rows_again)
    assert repeated.stragglers()[0]["late_seconds"] == pytest.approx(
        one.stragglers()[0]["late_seconds"], rel=1e-3
    )


def test_the_benchmark_calls_every_analysis(tmp_path: Path) -> None:
    found = trace_analysis.measure(tmp_path, num_events=1)
    assert found.num_slices == len(Trace.load(RUNS / "fsdp2")) and set(found.analysis_seconds) == set(
        trace_analysis.ANALYSES
    )


@pytest.mark.parametrize(("framework", "is_noted"), [("fsdp2", True), ("ddp", False)])
def test_all_reduces_that_were_reduce_scatters_are_noted(framework: str, is_noted: bool) -> None:
    trace = Trace.load(RUNS / framework)
    (text,) = (one.text for one in trace.summary().findings if one.text.startswith("Exposed all-reduce"))
    page = " ".join(describe_collectives(trace).sentences)
    assert [("gloo runs them as all-reduces" in shown) for shown in (text, page)] == [is_noted] * 2


def test_reduce_scatters_that_nccl_ran_are_not_among_gloos_all_reduces(tmp_path: Path) -> None:
    path = next((RUNS / "fsdp2" / "traces").iterdir())
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    other = tmp_path / "rank0.json"
    other.write_text(text.replace("gloo:all_gather", "nccl:reduce_scatter", 1))
    sentences = describe_collectives(Trace.load(other)).sentences
    assert not any("gloo runs them" in sentence for sentence in sentences)
