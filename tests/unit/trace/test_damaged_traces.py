"""Tests of damaged recordings: readable events are shown, the others are counted, by event and by file."""

from __future__ import annotations

import gzip
import json
import random
import re
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.requirements import sample
from trace_events import kernel, launch, operator, step, write_ranks

from shardscope.trace import Trace
from shardscope.trace import files as trace_files
from shardscope.trace.loading import splitting
from shardscope.trace.nesting import MAX_ROWS, compute_nesting_depth

BASE_NS = 1_700_000_000_000_000_000
NUM_EVENTS = 400


def make_events(count: int = NUM_EVENTS, name: str = "op") -> list[dict[str, Any]]:
    return [
        {"ph": "X", "cat": "cpu_op", "name": f"{name}{i}", "pid": 1, "tid": 1, "ts": 10.0 * i, "dur": 5.0}
        | {
            "args": {
                "Input Dims": [[i, 2], []],
                "Input type": ["float", "float"],
                "nested": [{"name": "a"}, {"name": "b"}],
            }
        }
        for i in range(count)
    ]


def write_rank(folder: Path, rank: int, events: list[dict[str, Any]] | None = None, **info: Any) -> Path:
    path = folder / f"rank-{rank}.json"
    data = {
        "distributedInfo": {"rank": rank, "world_size": 2} | info,
        "traceEvents": make_events() if events is None else events,
        "baseTimeNanoseconds": BASE_NS,
    }
    path.write_text(json.dumps(data, indent=1))
    return path


def notes_of(trace: Trace) -> str:
    return " | ".join(trace.notes)


@pytest.fixture(params=["one chunk", "many chunks"], autouse=True)
def chunk_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read each file as one chunk, and as many."""
    if request.param == "many chunks":
        monkeypatch.setattr(splitting, "CHUNK_BYTES", 5_000)


def test_every_chunking_reads_the_same_events(tmp_path: Path) -> None:
    trace = Trace.load(write_rank(tmp_path, 0))
    assert [trace.names[index] for index in trace.name_index] == [f"op{i}" for i in range(NUM_EVENTS)]
    assert trace.start_ns.tolist() == [10_000 * i for i in range(NUM_EVENTS)]
    assert [trace.args(i)["Input Dims"][0][0] for i in range(NUM_EVENTS)] == list(range(NUM_EVENTS))  # type: ignore[index]
    assert trace.notes == ["one rank of 2"]


@pytest.mark.parametrize("share", [0.3, 0.7, 0.95])
def test_fault_38_a_truncated_file_is_read_up_to_its_end(tmp_path: Path, share: float) -> None:
    path = write_rank(tmp_path, 0)
    text = path.read_bytes()
    path.write_bytes(text[: int(len(text) * share)])
    trace = Trace.load(path)
    num_whole = text[: int(len(text) * share)].count(b'"dur"')
    assert num_whole - 1 <= len(trace) <= num_whole
    assert trace.ranks == [0]
    assert "1 file that ends in the middle" in notes_of(trace)


def test_fault_38_a_truncated_gzip_is_read_up_to_its_end(tmp_path: Path) -> None:
    path = write_rank(tmp_path, 0)
    random.seed(0)
    noise = {"ph": "i", "name": "".join(random.choices("abcdef", k=3000)), "ts": 1.0}
    data = json.loads(path.read_text()) | {"traceEvents": [*make_events(), *[noise] * 3]}
    packed = gzip.compress(json.dumps(data).encode(), mtime=0)
    (tmp_path / "rank-0.json.gz").write_bytes(packed[:-1000])
    trace = Trace.load(tmp_path / "rank-0.json.gz")
    assert len(trace) == NUM_EVENTS
    assert "1 file that is a truncated gzip file, read up to there" in notes_of(trace)


def test_kernels_that_a_truncated_file_lost_are_not_blamed_on_the_host(tmp_path: Path) -> None:
    """Kineto writes operators first, then launches and kernels: a cut file has the GPU idle at its end."""
    operators = [operator(10_000_000 * i, 10_000_000 * i + 9_000_000) for i in range(100)]
    work = []
    for i in range(100):
        start = 10_000_000 * i
        work += [launch(start, start + 5_000, i), kernel(start + 6_000, start + 9_900_000, correlation=i)]
    path = write_ranks(tmp_path, {0: [*operators, *work]}) / "rank-0.json"
    assert "middle" not in str(Trace.load(path).summary())
    text = path.read_bytes()
    path.write_bytes(text[: len(text) // 2])
    trace = Trace.load(path)
    # So is what was exported of it.
    for one in (trace, Trace.load(trace.to_chrome(tmp_path / "merged.json"))):
        sentences = one.summary().sentences
        assert any("rank 0 ends in the middle" in sentence for sentence in sentences)
        assert any("work on the GPU" in sentence for sentence in sentences)
        assert not any("host" in sentence or "The GPU idles" in sentence for sentence in sentences)
        assert not any(row["seconds"] for row in one.idle() if row["cause"] == "host-bound")


def test_all_ranks_of_a_truncated_merged_file_are_incomplete(tmp_path: Path) -> None:
    events = [operator(1_000 * i, 1_000 * i + 900) for i in range(100)]
    folder = write_ranks(tmp_path / "ranks", {0: events, 1: events})
    path = Trace.load(folder).to_chrome(tmp_path / "all.json")
    path.write_bytes(path.read_bytes()[:-2000])
    summary = str(Trace.load(path).summary())
    assert "The files of ranks 0, 1 end in the middle" in summary and "on the GPU" not in summary


def test_idle_time_is_that_of_ranks_with_complete_files(tmp_path: Path) -> None:
    """Between operators, rank 0 is 300 us of 1,000, 200 of them in c10d; the file of rank 1 ends early."""
    events = [
        step(0, 0, 1_000_000),
        operator(0, 700_000),
        operator(750_000, 950_000, "c10d::allreduce_"),
        operator(999_999, 1_000_000),
    ]
    late = [step(0, 0, 1_000_000), operator(100_000, 900_000, "c10d::allreduce_")]
    folder = write_ranks(tmp_path, {0: events, 1: [*late, operator(999_000, 1_000_000, "aten::lost")]})
    path = folder / "rank-1.json"
    path.write_bytes(path.read_bytes().partition(b"aten::lost")[0])
    trace = Trace.load(folder)
    (text,) = (one for one in trace.summary().sentences if one.startswith("Between operators"))
    assert " 300 µs (30 %)" in text and " 200 µs of it" in text and "on rank 0." in text


def test_fault_38_one_unescaped_backslash_costs_no_other_event(tmp_path: Path) -> None:
    """torch wrote names and paths without escaping them: pytorch#98432."""
    path = write_rank(tmp_path, 0)
    text = path.read_text().replace('"op7"', r'"C:\work\op7"').replace('"op9"', r'"D:\dir\"')
    path.write_text(text)
    trace = Trace.load(path)
    assert len(trace) == NUM_EVENTS
    assert {r"C:\work\op7", "D:\\dir\\"} <= set(trace.names)
    assert "2 events with an unescaped backslash repaired" in notes_of(trace)


def test_fault_38_one_event_with_deep_arguments_costs_its_arguments_only(tmp_path: Path) -> None:
    path = write_rank(tmp_path, 0)
    deep = "[" * 100_000 + "]" * 100_000
    marked = [*make_events(), make_events(1, "deep")[0] | {"args": {"x": "DEEP"}}, *make_events(3, "after")]
    path = write_rank(tmp_path, 0, marked)
    path.write_text(path.read_text().replace('"DEEP"', deep))
    trace = Trace.load(path)
    assert len(trace) == NUM_EVENTS + 4
    assert "deep0" in trace.names
    assert "1 event nested too deeply shown without their arguments" in notes_of(trace)


def test_fault_38_garbage_between_events_costs_the_events_around_it(tmp_path: Path) -> None:
    path = write_rank(tmp_path, 0)
    text = path.read_bytes()
    middle = text.index(b'"op200"')
    path.write_bytes(text[:middle] + bytes(range(1, 32)) * 50 + text[middle:])
    trace = Trace.load(path)
    assert NUM_EVENTS - 2 <= len(trace) < NUM_EVENTS
    assert "malformed event" in notes_of(trace)


def test_fault_38_one_nan_is_read_without_its_number(tmp_path: Path) -> None:
    path = write_rank(tmp_path, 0)
    path.write_text(re.sub(r"\[\s*5,\s*2\s*\]", "[NaN, 2]", path.read_text()))
    trace = Trace.load(path)
    assert len(trace) == NUM_EVENTS
    assert trace.args(5)["Input Dims"] == [[None, 2], []]
    assert "1 event read leniently" in notes_of(trace)


def test_nested_arguments_with_nan_keep_their_event(tmp_path: Path) -> None:
    path = write_rank(tmp_path, 0)
    nested = '{"a": ' * 600 + "NaN" + "}" * 600
    path.write_text(path.read_text().replace('"args": {', f'"args": {{"deep": {nested}, ', 1))
    trace = Trace.load(path)
    assert len(trace) == NUM_EVENTS and "malformed" not in notes_of(trace)


def test_lone_surrogates_become_replacement_characters(tmp_path: Path) -> None:
    path = write_rank(tmp_path, 0)
    events = json.loads(path.read_text())["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "X"]
    text = (
        path.read_text()
        .replace(f'"{names[5]}"', '"cut \\ud83d"', 1)
        .replace(f'"{names[6]}"', '"\\ud83d\\ude00"', 1)
    )
    path.write_text(text.replace('"args": {', r'"args": {"\ud800": "\udc00", ', 1))
    trace = Trace.load(path)
    assert len(trace) == NUM_EVENTS
    assert {"cut \ufffd", "\U0001f600"} <= set(trace.names)
    assert "malformed" not in notes_of(trace) and "read leniently" in notes_of(trace)


def test_fault_38_a_header_that_is_no_json_keeps_rank_and_clock(tmp_path: Path) -> None:
    path = write_rank(tmp_path, 1)
    text = path.read_text().replace('"distributedInfo"', r'"hostName": "C:\x", "distributedInfo"')
    path.rename(tmp_path / "a.json").write_text(text)
    trace = Trace.load(tmp_path / "a.json")
    assert (len(trace), trace.ranks, trace.world_size) == (NUM_EVENTS, [1], 2)
    assert "header that is not JSON" in notes_of(trace)


def test_fault_38_an_events_key_in_a_string_is_not_the_list(tmp_path: Path) -> None:
    path = write_rank(tmp_path, 0)
    path.write_text(path.read_text().replace("{", '{"x": "\\"traceEvents\\": [", ', 1))
    assert len(Trace.load(path)) == NUM_EVENTS


def test_fault_38_a_long_footer_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    devices = [{"id": i, "name": f"GPU {i}" + "x" * 50} for i in range(300)]
    data = {"traceEvents": make_events(), "other": [[1], "]"], "deviceProperties": devices}
    path.write_text(json.dumps(data | {"distributedInfo": {"rank": 3, "world_size": 4}}))
    trace = Trace.load(path)
    assert (len(trace), trace.ranks, trace.notes) == (NUM_EVENTS, [3], ["one rank of 4"])


def test_fault_38_one_truncated_rank_of_a_folder_stays_aligned(tmp_path: Path) -> None:
    """The base time stands behind the events in Kineto's files: a truncated one has lost it."""
    write_rank(tmp_path, 0)
    path = write_rank(tmp_path, 1, make_events(name="late"))
    text = path.read_bytes()
    path.write_bytes(text[: len(text) // 2])
    trace = Trace.load(tmp_path)
    starts = {trace.names[n]: int(s) for n, s in zip(trace.name_index, trace.start_ns, strict=True)}
    assert trace.ranks == [0, 1]
    assert starts["op5"] == starts["late5"] == 50_000
    assert "rank 1: no base time in rank-1.json" in notes_of(trace)
    assert "rank 1: 1 file that ends in the middle" in notes_of(trace)


@pytest.mark.parametrize(
    "content",
    [
        b'{"model_type": "llama"}',
        b'[{"text": "a sample"}, {"text": "to train on"}]',
        b"[1, 2, 3]",
        b"",
        b"no json",
        b"\x1f\x8b\x08\x00",
    ],
)
def test_fault_38_a_stray_file_in_a_folder_is_left_out(tmp_path: Path, content: bytes) -> None:
    write_rank(tmp_path, 0, world_size=1)
    (tmp_path / "config.json").write_bytes(content)
    trace = Trace.load(tmp_path)
    assert len(trace) == NUM_EVENTS
    assert len(trace.notes) == 1 and trace.notes[0].startswith("left out: ")
    assert str(tmp_path / "config.json") in trace.notes[0]


@pytest.mark.parametrize(
    ("content", "fix"),
    [
        (b'{"traceEvents": [{"ph": "X", "na', "record it again"),
        (bytes(1000), "record it again"),
        (b"\x80\x04.", "give what torch.profiler exported"),
        (b"\x28\xb5\x2f\xfd", "give what torch.profiler exported"),
    ],
)
def test_other_files_are_not_to_be_recorded_again(tmp_path: Path, content: bytes, fix: str) -> None:
    """A snapshot of the memory or a trace in zstd is no trace that was cut."""
    path = tmp_path / "rank-0.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"rank-0.json is not JSON: .* Fix: {fix}"):
        Trace.load(path)


def test_fault_38_of_two_recordings_of_a_rank_the_latest_is_shown(tmp_path: Path) -> None:
    write_rank(tmp_path, 0)
    write_rank(tmp_path, 1)
    later = [event | {"ts": event["ts"] + 1e5} for event in make_events(3, "later")]
    path = write_rank(tmp_path, 1, later)
    path.rename(tmp_path / "a-second-cycle.json")
    write_rank(tmp_path, 1)
    trace = Trace.load(tmp_path)
    assert trace.ranks == [0, 1]
    assert len(trace) == NUM_EVENTS + 3
    assert "rank 1 has 2 recordings: a-second-cycle.json, the latest, is shown" in notes_of(trace)
    assert "left out: rank-1.json" in notes_of(trace)


def test_fault_38_a_cycle_that_not_all_ranks_have_written_is_left_out(tmp_path: Path) -> None:
    """As in the folder of a run that goes on: the ranks of two cycles were compared with each other."""

    def write_cycle(rank: int, cycle: int) -> None:
        begin = 5_000_000 * cycle
        events = [step(5 * cycle + one, begin + 10 * one, begin + 10 * one + 10) for one in (1, 2)]
        path = write_rank(tmp_path, rank, events)
        path.rename(tmp_path / f"cycle-{cycle}-rank-{rank}.json")

    for rank, cycle in ((0, 0), (1, 0), (0, 1), (1, 1), (0, 2)):
        write_cycle(rank, cycle)
    trace = Trace.load(tmp_path)
    assert {(row["rank"], row["step"]) for row in trace.steps()} == {(0, 6), (0, 7), (1, 6), (1, 7)}
    assert "cycle-1-rank-0.json, the latest whose steps all ranks recorded, is shown" in notes_of(trace)
    assert "left out: cycle-0-rank-0.json, cycle-2-rank-0.json" in notes_of(trace)


def test_fault_38_ranks_of_different_jobs_are_refused_by_name(tmp_path: Path) -> None:
    write_rank(tmp_path, 0, world_size=2)
    write_rank(tmp_path, 1, world_size=8)
    with pytest.raises(
        ValueError, match=r"rank-1\.json is of a job with 8 ranks, and rank-0\.json .* 2\. Fix:"
    ):
        Trace.load(tmp_path)


def test_fault_38_ranks_and_times_given_as_texts_keep_their_alignment(tmp_path: Path) -> None:
    for rank, delay in ((0, 0.0), (1, 2.5)):
        events = [event | {"ts": str(event["ts"] + delay), "dur": "5"} for event in make_events(4)]
        path = write_rank(tmp_path, rank, events, world_size="2")
        text = (
            path.read_text()
            .replace(str(BASE_NS), f'"{BASE_NS}"')
            .replace(f'"rank": {rank}', f'"rank": "{rank}"')
        )
        path.rename(tmp_path / f"host-{'ba'[rank]}.json").write_text(text)
    trace = Trace.load(tmp_path)
    assert trace.ranks == [0, 1] and trace.world_size == 2
    assert trace.start_ns.tolist() == [0, 10_000, 20_000, 30_000, 2_500, 12_500, 22_500, 32_500]
    assert trace.notes == []


@sample(1)
def test_fault_38_a_bomb_of_events_is_refused_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_files, "_RATIO_FROM_BYTES", 4 * 1024**2)
    path = tmp_path / "rank-0.json.gz"
    with gzip.open(path, "wb", compresslevel=9) as file:
        file.write(b'{"traceEvents":[' + b'{"ph":"X","ts":1},' * 1_000_000)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="which no profiler writes"):
            Trace.load(path)
        assert tracemalloc.get_traced_memory()[1] < 400 * 1024**2
    finally:
        tracemalloc.stop()


def test_slices_that_each_outlive_the_last_take_linear_time() -> None:
    """Each of 20,000 slices overlaps all later ones: on rows without a limit this took 22 s."""
    start = np.arange(20_000)
    begin = time.process_time()
    depth = compute_nesting_depth(start, start + 50_000)
    assert time.process_time() - begin < 2
    assert depth.tolist() == [min(index, MAX_ROWS) for index in range(20_000)]


def test_slices_beyond_the_last_row_are_summed_up(tmp_path: Path) -> None:
    events = [event | {"dur": 100_000.0} for event in make_events(MAX_ROWS + 40)]
    # Apart from those, two that touch nothing: they use the first row again.
    events += [event | {"ts": event["ts"] + 1e6} for event in make_events(2)]
    trace = Trace.load(write_rank(tmp_path, 0, events, world_size=1))
    assert trace.notes == [f"40 slices that overlap more than {MAX_ROWS} others summed up in an overflow row"]
    assert trace.tracks[0].num_rows == MAX_ROWS + 1
    (overflow,) = np.flatnonzero(trace.depth == MAX_ROWS).tolist()
    shown = trace.slice(overflow)
    assert (shown["name"], shown["category"], shown["args"]) == ("40 overlapping slices", "overflow", {})
    assert len(trace) == MAX_ROWS + 3
    assert shown["start_seconds"] == pytest.approx(MAX_ROWS * 10e-6)
    assert shown["duration_seconds"] == pytest.approx(0.1 + 39 * 10e-6)
