"""Tests of caches beside large trace files, and of reading in several processes."""

from __future__ import annotations

import copy
import gc
import gzip
import json
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.requirements import sample

from shardscope.trace import Trace
from shardscope.trace.loading import cache as caches
from shardscope.trace.loading import processes, ranks, splitting
from shardscope.trace.loading.column_format import pack_columns, unpack_columns
from shardscope.trace.loading.rank_columns import RankTexts

FIXTURE = Path(__file__).parents[2] / "fixtures" / "trace_2_ranks"
COLUMNS = ("start_ns", "duration_ns", "name_index", "track_index", "depth", "correlation")
NAMES = [path.name for path in sorted(FIXTURE.iterdir())]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of recorded ranks whose files count as large."""
    monkeypatch.setattr(caches, "MIN_FILE_BYTES", 1)
    for path in FIXTURE.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def list_open_files(folder: Path) -> list[str]:
    """Return the files of ``folder`` that this process has open."""
    targets = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return [str(target) for target in targets if target.is_relative_to(folder)]


def list_caches(folder: Path) -> list[Path]:
    return sorted((folder / caches.FOLDER).glob("*"))


def assert_same(one: Trace, other: Trace) -> None:
    for name in (*COLUMNS, "category_index"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
    for name in ("names", "categories", "tracks", "ranks", "notes", "process_groups", "world_size"):
        assert getattr(one, name) == getattr(other, name), name
    for name in ("phase", "time_ns", "name_index", "track_index", "key_index", "id"):
        assert np.array_equal(getattr(one.marks, name), getattr(other.marks, name)), name
    assert one.marks.keys == other.marks.keys
    assert [one.args(index) for index in range(0, len(one), 50)] == [
        other.args(index) for index in range(0, len(one), 50)
    ]


@pytest.mark.parametrize("method", ["summary", "breakdown", "kernels", "collectives", "critical_path"])
def test_an_unused_trace_is_freed_and_its_files_are_closed_at_once(folder: Path, method: str) -> None:
    """Not when Python looks for cycles: it counts objects, and a trace has few, of gigabytes."""
    Trace.load(folder)
    gc.collect()
    gc.disable()
    try:
        trace = Trace.load(folder)
        getattr(trace, method)()
        assert trace.args(0) and len(trace.flows)
        alive, is_open = weakref.ref(trace), list_open_files(folder)
        del trace
        assert is_open and not list_open_files(folder)
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_of_a_trace_outlives_it(folder: Path, duplicate: Callable[[Trace], Trace]) -> None:
    trace = Trace.load(folder)
    kernels = trace.kernels()
    other = duplicate(trace)
    del trace
    gc.collect()
    assert list(other.kernels()) == list(kernels)
    assert other.activity.trace is other


def test_an_activity_without_its_trace_gives_the_fix(folder: Path) -> None:
    with pytest.raises(ReferenceError, match=r"Fix: keep it in a variable, trace = ss\.Trace\.load"):
        _ = Trace.load(folder).activity.ranks


def test_second_opening_reads_the_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Trace.load(folder)
    assert len(list_caches(folder)) == len(NAMES) > 1

    def refuse(*_: object) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr(ranks, "read_rank", refuse)
    again = Trace.load(folder)
    assert_same(first, again)
    assert str(first.summary()) == str(again.summary())


def test_a_changed_file_is_read_again(folder: Path) -> None:
    Trace.load(folder)
    path = folder / NAMES[0]
    data = json.loads(gzip.decompress(path.read_bytes()))
    data["traceEvents"] = data["traceEvents"][:500]
    path.write_bytes(gzip.compress(json.dumps(data).encode()))
    changed = Trace.load(folder)
    assert_same(changed, Trace.load(folder, cache=False))
    # The cache of the earlier content is gone.
    assert len(list_caches(folder)) == len(NAMES)


def test_without_caches_nothing_is_written(folder: Path) -> None:
    Trace.load(folder, cache=False)
    assert not (folder / caches.FOLDER).exists()


def test_a_folder_that_cannot_be_written_has_no_cache(folder: Path) -> None:
    (folder / caches.FOLDER).write_text("a file in its place")
    assert len(Trace.load(folder)) == len(Trace.load(folder, cache=False))


def test_a_read_only_folder_has_no_cache(folder: Path) -> None:
    folder.chmod(0o500)
    try:
        assert len(Trace.load(folder))
        assert not (folder / caches.FOLDER).exists()
    finally:
        folder.chmod(0o700)


@sample(3)
@pytest.mark.parametrize("share", [0.0, 0.001, 0.2, 0.5, 0.8])
@pytest.mark.parametrize("kind", ["truncated", "overwritten"])
def test_a_damaged_cache_is_ignored(folder: Path, share: float, kind: str) -> None:
    expected = Trace.load(folder, cache=False)
    Trace.load(folder)
    for cache in list_caches(folder):
        text = cache.read_bytes()
        position = int(len(text) * share)
        damaged = b"" if kind == "truncated" else b"\x7f" * 100 + text[position + 100 :]
        cache.write_bytes(text[:position] + damaged)
    loaded = Trace.load(folder)
    # Damaged arguments are seen when they are decompressed: they are missing, and nothing else is.
    for name in COLUMNS:
        assert np.array_equal(getattr(loaded, name), getattr(expected, name)), name
    assert str(loaded.summary().ranks) == str(expected.summary().ranks)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("slices.name", 10**6),
        ("slices.track", -1),
        ("slices.depth", 499),
        ("slices.row", 10**8),
        ("slices.duration_ns", -5),
        ("marks.key", -3),
    ],
)
def test_a_cache_with_indices_out_of_range_is_ignored(folder: Path, column: str, value: int) -> None:
    """Someone else may have written it, with valid checksums."""
    expected = Trace.load(folder)
    for cache in list_caches(folder):
        texts, arrays, rest = unpack_columns(memoryview(cache.read_bytes()), RankTexts)
        arrays = {name: array.copy() for name, array in arrays.items()}
        arrays[column][0] = value
        cache.write_bytes(b"".join(pack_columns(texts, arrays, rest)))
    assert_same(Trace.load(folder), expected)


def test_a_link_in_place_of_a_cache_is_not_followed(folder: Path) -> None:
    other = folder / "file"
    other.write_text("unchanged")
    expected = Trace.load(folder)
    for cache in list_caches(folder):
        cache.unlink()
        cache.symlink_to(other)
    assert_same(Trace.load(folder), expected)
    assert other.read_text() == "unchanged"


@pytest.fixture
def two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_LARGE_BYTES", 1)
    monkeypatch.setattr(ranks, "count_processes", lambda: 2)


@pytest.mark.usefixtures("two_processes")
@pytest.mark.parametrize("cache", [True, False])
def test_processes_read_what_this_one_reads(
    folder: Path, monkeypatch: pytest.MonkeyPatch, cache: bool
) -> None:
    (folder / "config.json").write_text('{"model_type": "llama"}')
    shares: list[float] = []
    loaded = Trace.load(folder, cache=cache, progress=shares.append)
    assert shares == sorted(shares) and shares[-1] == 1.0
    monkeypatch.setattr(ranks, "count_processes", lambda: 1)
    assert_same(loaded, Trace.load(folder, cache=False))


@pytest.mark.usefixtures("two_processes")
def test_processes_decode_the_chunks_of_one_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitting, "CHUNK_BYTES", 50_000)
    path = folder / NAMES[0]
    loaded = Trace.load(path, cache=False)
    monkeypatch.setattr(ranks, "count_processes", lambda: 1)
    assert_same(loaded, Trace.load(path, cache=False))


@pytest.mark.usefixtures("two_processes")
@pytest.mark.parametrize("source", ["folder", "file"])
def test_an_exception_of_progress_cancels_the_load(
    folder: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setattr(splitting, "CHUNK_BYTES", 50_000)
    started: list[Any] = []
    start = processes._start_worker
    monkeypatch.setattr(processes, "_start_worker", lambda: started.append(start()) or started[-1])

    class CancelledError(Exception):
        pass

    def cancel(share: float) -> None:
        raise CancelledError

    with pytest.raises(CancelledError):
        Trace.load(folder if source == "folder" else folder / NAMES[0], progress=cancel)
    assert len(started) == 2
    assert all(worker.poll() is not None for worker in started)


@pytest.mark.usefixtures("two_processes")
def test_a_process_that_is_killed_leaves_out_its_file_with_the_reason(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = processes._start_worker
    monkeypatch.setattr(processes, "_start_worker", lambda: _kill(start()))
    with pytest.raises(ValueError, match=r"ended with status -9.*Fix: load fewer ranks"):
        Trace.load(folder)


def _kill(worker: Any) -> Any:
    worker.kill()
    worker.wait()
    return worker
