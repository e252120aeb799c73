"""Tests of loading traces: one time axis, malformed events are counted, and other files are rejected."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.faults import slow_test
from tests.requirements import sample

from shardscope.trace import Trace
from shardscope.trace import files as trace_files
from shardscope.trace.nesting import compute_nesting_depth, compute_union_ns

FIXTURE = Path(__file__).parents[2] / "fixtures" / "trace_2_ranks"
STACKS = FIXTURE.parent / "trace_with_stacks"
# An optional folder of data beside the clone, which CI machines do not have.
BESIDE_THE_REPOSITORY = Path(__file__).parents[4] / "shared" / "data" / "traces"
REAL = Path(os.environ.get("SHARDSCOPE_REAL_TRACES") or BESIDE_THE_REPOSITORY)


def make_event(name: str = "op", ts: Any = 0.0, dur: Any = 10.0, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur, **more}


def write_trace(path: Path, events: Any, **more: Any) -> Path:
    path.write_text(json.dumps({"traceEvents": events, **more}))
    return path


def read_notes(path: Path) -> str:
    return " | ".join(Trace.load(path).notes)


def test_traces_of_other_tools_are_named(tmp_path: Path) -> None:
    """JAX names no category: its kernels, on processes of devices, would be the CPU's without a word."""
    events = [
        make_event(name, ts, pid=pid) for name, ts, pid in (("jit", 0.0, 701), ("gemm_fusion", 20.0, 1))
    ]
    for event in events:
        del event["cat"]
    assert "no category of torch.profiler" in read_notes(write_trace(tmp_path / "jax.json", events))
    assert "category" not in read_notes(write_trace(tmp_path / "torch.json", [make_event()]))


def test_recorded_ranks_share_one_wall_clock() -> None:
    trace = Trace.load(FIXTURE)
    assert trace.ranks == [0, 1]
    assert len(trace) > 1000
    assert 0 < trace.duration_seconds < 60
    assert int(trace.start_ns.min()) == 0
    assert "gloo:all_reduce" in trace.names
    # Both ranks leave an all-reduce at the same moment, so the axis is right to well under a millisecond.
    calls = np.flatnonzero(trace.name_index == trace.names.index("gloo:all_reduce"))
    ranks = np.array([trace.tracks[trace.track_index[index]].rank for index in calls])
    ends = (trace.start_ns + trace.duration_ns)[calls]
    assert np.abs(np.sort(ends[ranks == 0]) - np.sort(ends[ranks == 1])).max() < 2_000_000


def test_loads_a_file_a_folder_and_a_run(tmp_path: Path) -> None:
    shutil.copytree(FIXTURE, tmp_path / "traces")
    num_slices = len(Trace.load(FIXTURE))
    assert len(Trace.load(tmp_path)) == num_slices
    assert len(Trace.load(SimpleNamespace(folder=tmp_path))) == num_slices
    assert Trace.load(FIXTURE / "rank-1.json.gz").ranks == [1]


def test_summary_has_a_row_per_rank() -> None:
    trace = Trace.load(FIXTURE)
    summary = trace.summary()
    rows = summary.ranks
    assert [row["rank"] for row in rows] == [0, 1]
    assert sum(row["slices"] for row in rows) == len(trace)
    assert all(0 < row["cpu_busy_seconds"] <= row["span_seconds"] for row in rows)
    assert all(row["gpu_busy_seconds"] == 0 and row["communication_seconds"] > 0 for row in rows)
    assert list(summary.ranks.to_frame()["rank"]) == [0, 1]
    assert "2 ranks" in str(summary) and "on CPU ranks:" in str(summary)


def test_busy_time_excludes_annotations(tmp_path: Path) -> None:
    step = make_event("ProfilerStep#1", 0, 1000, cat="user_annotation")
    kernel = make_event("gemm", 100, 50, cat="kernel", pid=0, tid=7)
    path = write_trace(
        tmp_path / "a.json", [step, make_event("aten::mm", 10, 20), make_event("aten::mm", 20, 20), kernel]
    )
    row = Trace.load(path).summary().ranks[0]
    assert row["cpu_busy_seconds"] == pytest.approx(30e-6)
    assert row["gpu_busy_seconds"] == pytest.approx(50e-6)
    assert row["span_seconds"] == pytest.approx(1e-3)


def test_summary_splits_gpu_time_by_compute_communication_and_idle(tmp_path: Path) -> None:
    def on_stream(name: str, ts: float, dur: float, stream: int, cat: str = "kernel") -> dict[str, Any]:
        return make_event(name, ts, dur, cat=cat, pid=0, tid=stream)

    events = [
        on_stream("gemm", 0, 40, 7),
        on_stream("multimem_all_reduce_kernel", 30, 30, 20),
        on_stream("Memcpy DtoH", 70, 10, 7, "gpu_memcpy"),
        on_stream("ProfilerStep#1", 0, 100, 7, "gpu_user_annotation"),
    ]
    summary = Trace.load(write_trace(tmp_path / "rank-0.json", events)).summary()
    row = summary.ranks[0]
    assert row["compute_seconds"] == pytest.approx(40e-6)
    assert row["communication_seconds"] == pytest.approx(30e-6)
    assert row["exposed_communication_seconds"] == pytest.approx(20e-6)
    assert row["idle_seconds"] == pytest.approx(30e-6)
    assert "40 % compute, 20 % exposed communication, 10 % copies, 30 % idle" in str(summary)
    assert {row["name"] for row in summary.operators} == {"gemm", "multimem_all_reduce_kernel", "Memcpy DtoH"}


def test_html_summary_has_tables_and_escapes_names(tmp_path: Path) -> None:
    event = make_event("<script>alert(1)</script>", 0, 10)
    trace = Trace.load(write_trace(tmp_path / "rank-0.json", [event]))
    for html in (trace.summary()._repr_html_(), trace._repr_html_()):
        assert "<table" in html and "<script" not in html and "&lt;script&gt;" in html


def test_tracks_are_named_after_threads_and_streams(tmp_path: Path) -> None:
    events = [
        make_event(tid=42),
        make_event("k", 1, 2, cat="kernel", pid=0, tid=20),
        make_event("k", 1, 2, cat="kernel", pid=0, tid=7),
    ]
    tracks = Trace.load(write_trace(tmp_path / "rank-3.json", events)).tracks
    assert [track.label for track in tracks] == [
        "rank 3 · stream 7",
        "rank 3 · stream 20",
        "rank 3 · CPU thread 42",
    ]
    assert [track.kind for track in tracks] == ["gpu", "gpu", "cpu"]


def make_metadata(kind: str, pid: int, tid: int, **args: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def test_thread_names_come_from_the_operating_system(tmp_path: Path) -> None:
    events = [
        make_event(tid=1, dur=90),
        make_event(tid=8, dur=80),
        make_event(tid=9, dur=70),
        make_event(tid=10, dur=60),
        make_event(tid=11, dur=50),
        make_metadata("process_name", 1, 0, name="python"),
        make_metadata("thread_name", 1, 1, name="thread 1 (python3.11)"),
        make_metadata("thread_name", 1, 8, name="thread 8 (pt_autograd_0)"),
        make_metadata("thread_name", 1, 9, name="thread 9 (worker)"),
        make_metadata("thread_name", 1, 10, name="thread 10 (worker)"),
        make_metadata("thread_name", 1, 11, name=7),
    ]
    tracks = Trace.load(write_trace(tmp_path / "rank-0.json", events)).tracks
    assert [track.name for track in tracks] == [
        "main thread (python3.11)",
        "pt_autograd_0",
        "worker 9",
        "worker 10",
        "CPU thread 11",
    ]


def test_processes_of_one_file_have_distinct_track_names(tmp_path: Path) -> None:
    events = [
        make_event(pid=1, tid=5),
        make_event(pid=2, tid=5),
        make_metadata("process_name", 2, 0, name="data loader"),
    ]
    names = {track.name for track in Trace.load(write_trace(tmp_path / "rank-0.json", events)).tracks}
    assert names == {"process 1 CPU thread 5", "data loader 2 CPU thread 5"}


def test_process_with_a_small_pid_is_not_taken_for_a_gpu(tmp_path: Path) -> None:
    """Kineto labels the process ids 0 to 15 as GPUs; in a container the training process may be number 1."""
    events = [
        make_event(pid=1),
        make_metadata("process_labels", 1, 0, labels="GPU 1"),
        make_metadata("process_labels", 1, 0, labels="CPU"),
    ]
    assert [track.kind for track in Trace.load(write_trace(tmp_path / "a.json", events)).tracks] == ["cpu"]


def test_python_stacks_are_separate_tracks_after_gpu_and_operators() -> None:
    tracks = Trace.load(STACKS).tracks
    assert [(track.name, track.kind) for track in tracks] == [
        ("stream 7", "gpu"),
        ("stream 20", "gpu"),
        ("main thread (python)", "cpu"),
        ("Python stacks of main thread (python)", "python"),
        ("pt_autograd_0", "cpu"),
    ]
    rows = {track.kind: track.num_rows for track in tracks}
    assert rows["python"] >= 38 and rows["cpu"] < 12


@pytest.mark.skipif(
    not REAL.is_dir(), reason="too large for the repository; set SHARDSCOPE_REAL_TRACES to a folder of traces"
)
def test_real_trace_lists_streams_before_named_threads() -> None:
    tracks = Trace.load(REAL / "nccl_parser_config__nccl_data.json.gz").tracks
    assert [track.kind for track in tracks] == ["gpu", "gpu", "cpu", "cpu", "cpu"]
    assert [track.name for track in tracks][2:4] == ["pt_main_thread", "pt_autograd_0"]


def test_nested_and_overlapping_slices_get_separate_rows() -> None:
    start = np.array([0, 10, 20, 50, 55, 100])
    end = np.array([100, 40, 30, 70, 80, 110])
    assert compute_nesting_depth(start, end).tolist() == [0, 1, 2, 1, 2, 0]


@pytest.mark.parametrize("seed", range(5))
def test_no_two_slices_of_a_row_overlap(seed: int) -> None:
    random = np.random.default_rng(seed)
    start = np.sort(random.integers(0, 10_000, 800))
    end = start + random.integers(0, 300, 800)
    order = np.lexsort((-end, start))
    start, end = start[order], end[order]
    depth = compute_nesting_depth(start, end)
    for row in range(depth.max() + 1):
        mine = depth == row
        assert np.all(start[mine][1:] >= end[mine][:-1])


def test_a_long_chain_of_overlaps_needs_two_rows() -> None:
    start = np.arange(0, 10_000, 10)
    assert compute_nesting_depth(start, start + 15).max() == 1


def test_union_counts_overlapping_time_once() -> None:
    assert compute_union_ns(np.array([0, 5, 20]), np.array([10, 12, 30])) == 22
    assert compute_union_ns(np.zeros(0, np.int64), np.zeros(0, np.int64)) == 0


def test_fault_38_unsorted_events_keep_nanoseconds(tmp_path: Path) -> None:
    base = 1_790_857_026_000_000_000
    events = [make_event("late", 4352837229041.284, 1.5), make_event("early", 4352837229040.001, 0.25)]
    trace = Trace.load(write_trace(tmp_path / "a.json", events, baseTimeNanoseconds=base))
    by_name = {trace.names[n]: int(s) for n, s in zip(trace.name_index, trace.start_ns, strict=True)}
    assert by_name == {"early": 0, "late": 1283}
    assert sorted(trace.duration_ns.tolist()) == [250, 1500]


def test_fault_38_rank_is_read_from_content_then_name_then_order(tmp_path: Path) -> None:
    write_trace(tmp_path / "a.json", [make_event()], distributedInfo={"rank": 5, "world_size": 8})
    write_trace(tmp_path / "b_rank-2.json", [make_event()])
    write_trace(tmp_path / "c.json", [make_event()])
    trace = Trace.load(tmp_path)
    assert trace.ranks == [0, 2, 5]
    assert any("numbered by order" in note for note in trace.notes)
    write_trace(tmp_path / "d.json", [make_event()])
    notes = Trace.load(tmp_path).notes
    assert any("2 files without a rank, numbered by order" in note for note in notes)
    assert any("5 of 8" in note and "1, 3, 4, 6, 7" in note for note in trace.notes)


@pytest.mark.parametrize(
    ("odd", "note", "num_slices"),
    [
        ({"dur": None}, "1 slice without dur", 2),
        ({"dur": -5.0}, "negative dur", 2),
        ({"dur": 1e300}, "longer than a day", 1),
        ({"ts": None}, "without a readable ts", 1),
        ({"ts": 1e14}, "more than a day from", 1),
        ({"ts": "soon"}, "1 malformed event left out", 1),
        ({"pid": 1.5}, "malformed", 1),
        ({"name": None}, "malformed", 1),
        ({"ph": "B"}, "begin event without an end", 2),
        ({"ph": "E"}, "end event without a begin", 1),
        ({"ph": "?"}, "unknown kind", 1),
    ],
)
def test_fault_38_malformed_events_are_counted_not_fatal(
    tmp_path: Path, odd: dict[str, Any], note: str, num_slices: int
) -> None:
    good = make_event("good")
    path = write_trace(tmp_path / "a.json", [good, good | {"name": "odd"} | odd])
    trace = Trace.load(path)
    assert len(trace) == num_slices
    assert any(text.startswith("1 ") and note in text for text in trace.notes), trace.notes
    assert bool(np.all(trace.duration_ns >= 0))


def test_fault_38_events_without_dur_cat_pid_or_tid_are_kept(tmp_path: Path) -> None:
    trace = Trace.load(write_trace(tmp_path / "a.json", [{"ph": "X", "name": "bare", "ts": 1}]))
    assert trace.slice(0)["name"] == "bare"
    assert trace.slice(0)["category"] == ""


@pytest.mark.parametrize("index", [-1, 10**6, 10**30])
def test_a_slice_outside_of_the_trace_raises_index_error(index: int) -> None:
    trace = Trace.load(FIXTURE)
    for read in (trace.slice, trace.args):
        with pytest.raises(IndexError, match=f"of {len(trace):,} slices"):
            read(index)


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 400])
def test_fault_38_numbers_that_are_not_json_are_reported(tmp_path: Path, text: str) -> None:
    good = json.dumps(make_event("good"))
    (tmp_path / "a.json").write_text(f'{{"traceEvents": [{good}, {good.replace("10.0", text)}]}}')
    trace = Trace.load(tmp_path / "a.json")
    assert 1 <= len(trace) <= 2
    assert trace.notes


def test_reads_invalid_utf8_and_a_byte_order_mark(tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": [make_event("n@me")]}).encode().replace(b"@", b"\xff")
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf" + text)
    trace = Trace.load(tmp_path / "a.json")
    assert trace.names == ["n\ufffdme"]
    assert any("leniently" in note for note in trace.notes)


def test_loads_a_bare_list_of_events(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([make_event(), make_event("later", 20)]))
    assert len(Trace.load(tmp_path / "a.json")) == 2


@pytest.mark.parametrize(
    "events", [[], [{"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}}]]
)
def test_fault_38_trace_without_slices_is_empty_with_a_note(tmp_path: Path, events: list[Any]) -> None:
    trace = Trace.load(write_trace(tmp_path / "a.json", events))
    assert (len(trace), trace.duration_seconds, trace.tracks) == (0, 0.0, [])
    assert any("no slices" in note for note in trace.notes)
    assert trace.summary().ranks[0]["slices"] == 0
    assert "0 slices" in trace._repr_html_()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"not json", "is not JSON"),
        (b'{"traceEvents": [{"ph": "X", "na', "is not JSON"),
        (b'{"schemaVersion": 1}', "no traceEvents"),
        (b'{"traceEvents": 7}', "traceEvents"),
        (b"[" * 200_000, "not a profiler trace"),
        (b"\x1f\x8b\x08\x00", "truncated gzip"),
        (b"\x1f\x8b" + b"junk" * 50, "damaged gzip"),
        (gzip.compress(b'{"traceEvents": []}' * 50, mtime=0)[:-12], "truncated gzip"),
    ],
)
def test_fault_38_rejects_other_files_with_their_path_and_a_fix(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "rank-0.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        Trace.load(path)
    assert str(path) in str(error.value) and "Fix: " in str(error.value)


def test_a_folder_of_folders_names_those_with_traces(tmp_path: Path) -> None:
    for node in ("node0", "node1", "logs"):
        (tmp_path / node).mkdir()
    (tmp_path / "node0" / "rank-0.json.gz").write_bytes(b"")
    with pytest.raises(ValueError, match=f"Fix: give {tmp_path / 'node0'}"):
        Trace.load(tmp_path)
    (tmp_path / "node1" / "rank-1.json").write_bytes(b"")
    with pytest.raises(ValueError, match=f"2 subfolders .* such as {tmp_path / 'node0'}"):
        Trace.load(tmp_path)


def test_fault_38_rejects_a_gzip_bomb_early(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.json.gz"
    path.write_bytes(gzip.compress(b" " * (64 * 1024**2)))
    with pytest.raises(ValueError, match="which no profiler writes"):
        Trace.load(path)


def test_fault_38_a_gzip_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.json.gz"
    path.write_bytes(gzip.compress(b" " * (256 * 1024**2), compresslevel=6))
    stream = trace_files.TextStream(path)
    num_bytes = 0
    with contextlib.closing(stream), pytest.raises(ValueError, match="which no profiler writes"):
        while piece := stream.read(1024**2):
            num_bytes += len(piece)
    assert num_bytes < 32 * 1024**2


def test_fault_38_rejects_files_above_the_size_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_files, "MAX_JSON_BYTES", 10_000)
    big = write_trace(tmp_path / "a.json", [make_event()] * 500)
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(big.read_bytes()))
    for path in (big, tmp_path / "b.json.gz"):
        with pytest.raises(ValueError, match=r"GiB of JSON.*Fix: record fewer steps"):
            Trace.load(path)


def test_fault_38_rejects_more_than_2_gib_before_reading(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.json"
    path.touch()
    os.truncate(path, 2 * 1024**3 + 1)  # Sparse: it takes no space on the disk.
    with pytest.raises(ValueError, match=r"more than 2 GiB of JSON\. Fix: record fewer steps"):
        Trace.load(path)


@slow_test
def test_fault_38_reads_a_file_one_byte_below_2_gib(tmp_path: Path) -> None:
    """Pad one event with blanks; this takes 4 GiB of memory and 2 GiB of disk for some seconds."""
    path = tmp_path / "rank-0.json"
    text = json.dumps({"traceEvents": [make_event()]}).encode()
    try:
        with path.open("wb") as file:
            file.write(text[:-1])
            left = 2 * 1024**3 - 1 - len(text)
            for _ in range(left // 2**20):
                file.write(b" " * 2**20)
            file.write(b" " * (left % 2**20) + text[-1:])
        assert path.stat().st_size == 2 * 1024**3 - 1
        assert len(Trace.load(path)) == 1
    finally:
        path.unlink()


def test_fault_38_missing_ranks_are_listed_in_a_note(tmp_path: Path) -> None:
    for rank in (0, 3):
        write_trace(
            tmp_path / f"rank-{rank}.json", [make_event()], distributedInfo={"rank": rank, "world_size": 4}
        )
    assert any("2 of 4" in note and "1, 2" in note for note in Trace.load(tmp_path).notes)


def test_fault_41_rejects_links_pipes_and_folders(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    target = write_trace(tmp_path / "real" / "a.json", [make_event()])
    link = tmp_path / "link.json"
    link.symlink_to(target)
    with pytest.raises(ValueError, match="symbolic link"):
        Trace.load(link)
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(ValueError, match="pipe"):
        Trace.load(tmp_path / "pipe.json")
    (tmp_path / "ranks" / "rank-0.json").mkdir(parents=True)
    with pytest.raises(ValueError, match="is a folder"):
        Trace.load(tmp_path / "ranks")


@pytest.mark.parametrize("source", ["missing.json", "empty_folder", 7, None])
def test_rejects_missing_files(tmp_path: Path, source: Any) -> None:
    (tmp_path / "empty_folder").mkdir()
    with pytest.raises(ValueError, match="Fix: "):
        Trace.load(tmp_path / source if isinstance(source, str) else source)


def test_run_without_a_trace_suggests_profile_true(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="profile=True"):
        Trace.load(SimpleNamespace(folder=tmp_path))


def test_arguments_are_decoded_on_request(tmp_path: Path) -> None:
    path = write_trace(
        tmp_path / "a.json", [make_event(args={"Input Dims": [[2, 3]]}), make_event("bare", 50)]
    )
    trace = Trace.load(path)
    assert trace.args(0) == {"Input Dims": [[2, 3]]}
    assert trace.args(1) == {}


@sample(3)
@pytest.mark.skipif(
    not REAL.is_dir(), reason="too large for the repository; set SHARDSCOPE_REAL_TRACES to a folder of traces"
)
@pytest.mark.parametrize(
    "path", [*sorted(REAL.glob("*.json.gz")), *REAL.glob("dlrm_8rank")], ids=lambda path: path.name
)
def test_real_traces_load(path: Path) -> None:
    trace = Trace.load(path)
    assert len(trace) > 4000
    assert 0.01 < trace.duration_seconds < 60
    # All of these are intact, so that nothing is repaired or left out.
    assert all("of" in note and "rank" in note for note in trace.notes)
