"""Tracks of one rank: streams, threads and Python stacks, their names, and the rows of their slices."""

from __future__ import annotations

import re
from collections import Counter
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from shardscope.trace.categories import GPU_CATEGORIES, OVERFLOW_CATEGORY, PYTHON_CATEGORY
from shardscope.trace.loading.chunks import ChunkTexts, Int64s, Key, as_integers
from shardscope.trace.loading.pairs import ASYNC_PREFIX, Columns, concatenate, reorder, select
from shardscope.trace.nesting import MAX_ROWS, compute_nesting_depth

_STREAM = re.compile(r"stream \d", re.IGNORECASE)
_STREAM_PREFIX = re.compile(r"^stream ", re.IGNORECASE)

Kind = Literal["cpu", "gpu", "python", "async"]


class RankTrack(msgspec.Struct, kw_only=True):
    """A GPU stream, the operators or the Python stacks of one thread, or asynchronous work."""

    key: int
    """Index of its process and thread in the rank's keys."""
    kind: Kind
    name: str
    num_rows: int
    num_slices: int


class TrackTexts:
    """Names that metadata events give to processes and threads of one file."""

    def __init__(self) -> None:
        self.process_names: dict[int | str, str] = {}
        """``process_name`` metadata: "python", "trainer 3"."""
        self.thread_names: dict[Key, str] = {}
        """``thread_name`` metadata by process and thread: "pt_autograd_0"."""
        self._labels: dict[int | str, str] = {}

    def add(self, texts: ChunkTexts) -> None:
        """Add the metadata of a chunk."""
        self.process_names.update(texts.process_names)
        self.thread_names.update({(process, thread): name for process, thread, name in texts.thread_names})
        # Kineto writes several process_labels for one id: they are joined before looking for "CPU" and "GPU".
        for process, label in texts.process_labels:
            self._labels[process] = self._labels.get(process, "")[:1000] + label

    @property
    def gpu_processes(self) -> set[int | str]:
        """Process ids that denote a GPU.

        Kineto labels the ids 0 to 15 as GPUs. In a container the training process may have one of these ids
        too; then it is also labeled "CPU".
        """
        return {process for process, text in self._labels.items() if "GPU" in text and "CPU" not in text}


def place_slices(
    slices: Columns,
    names: list[str],
    categories: list[str],
    keys: list[Key],
    texts: TrackTexts,
    oddities: Counter[str],
) -> tuple[list[RankTrack], Columns]:
    """Return the tracks, and the slices with ``track`` and ``depth``, sorted by track, row and start.

    Slices that overlap more others than a track has rows are summed up in an overflow row.
    """
    kinds = _find_kinds(slices, categories, keys, texts)
    used = np.unique(slices["key"]).tolist()  # others are of marks only
    names_of_used = _name_keys([keys[key] for key in used], [kinds[key] == "gpu" for key in used], texts)
    key_names = dict(zip(used, names_of_used, strict=True))
    # Slices by key, and of a key by start, longer first on ties.
    reorder(slices, np.lexsort((-slices["duration_ns"], slices["start_ns"], slices["key"])))
    bounds = np.searchsorted(slices["key"], np.arange(len(keys) + 1))
    python = categories.index(PYTHON_CATEGORY) if PYTHON_CATEGORY in categories else -1
    is_frame = slices["category"] == python
    end_ns = slices["start_ns"] + slices["duration_ns"]
    overflow = _Overflow(slices, names, categories)
    tracks: list[RankTrack] = []
    order: list[Int64s] = []
    depths: list[npt.NDArray[np.int32]] = []
    for key in _order_keys(kinds, keys, slices, is_frame):
        index = np.arange(bounds[key], bounds[key + 1])
        # Python frames get separate tracks and do not count as busy time.
        parts: list[tuple[Kind, Int64s]] = [(kinds[key], index)]
        if kinds[key] == "cpu":
            frames = is_frame[index]
            parts = [("cpu", index[~frames]), ("python", index[frames])]
        for kind, part in parts:
            if not len(part):
                continue
            depth = compute_nesting_depth(slices["start_ns"][part], end_ns[part])
            by_row = np.argsort(depth, kind="stable")
            part, depth = overflow.sum_up(part[by_row], depth[by_row])
            order.append(part)
            depths.append(depth)
            tracks.append(
                RankTrack(
                    key=key,
                    kind=kind,
                    name=f"Python stacks of {key_names[key]}" if kind == "python" else key_names[key],
                    num_rows=int(depth[-1]) + 1,
                    num_slices=len(depth),
                )
            )
    if overflow.num_slices:
        what = f"slices that overlap more than {MAX_ROWS} others summed up in an overflow row"
        oddities[what] += overflow.num_slices
        slices = concatenate([slices, overflow.collect_sums()])
    del slices["key"], end_ns, is_frame
    reorder(slices, np.concatenate([np.zeros(0, np.int64), *order]))
    slices["depth"] = as_integers(np.concatenate([np.zeros(0, np.int32), *depths]))
    sizes = [len(depth) for depth in depths]
    slices["track"] = as_integers(np.repeat(np.arange(len(tracks), dtype=np.int32), sizes))
    return tracks, slices


class _Overflow:
    """Sums up the slices beyond the last row of a track: those that touch become one slice."""

    def __init__(self, slices: Columns, names: list[str], categories: list[str]) -> None:
        self.num_slices = 0
        self._slices = slices
        self._names = names
        self._categories = categories
        self._num_sums = 0
        self._sums: list[Columns] = []

    def sum_up(self, index: Int64s, depth: npt.NDArray[np.int32]) -> tuple[Int64s, npt.NDArray[np.int32]]:
        """Return the slices of a track and their rows, sorted by row, with sums in place of the last row."""
        first = int(np.searchsorted(depth, MAX_ROWS))
        if first == len(depth):
            return index, depth
        beyond = select(self._slices, index[first:], tuple(self._slices))
        start = beyond["start_ns"]
        reach = np.maximum.accumulate(start + beyond["duration_ns"])
        begins = np.flatnonzero(np.concatenate(([True], start[1:] > reach[:-1])))
        counts = np.diff(begins, append=len(start))
        self.num_slices += len(start)
        sums = select(beyond, begins, tuple(beyond))
        sums["duration_ns"] = reach[begins + counts - 1] - sums["start_ns"]
        names = [self._add_name(f"{count:,} overlapping slices") for count in counts.tolist()]
        sums["name"] = np.array(names)
        sums["category"] = np.full(len(begins), self._add_category())
        sums["id"] = np.full(len(begins), -1)
        sums["row"] = np.full(len(begins), -1)
        self._sums.append(sums)
        # They will stand behind all slices of the rank.
        new = len(self._slices["start_ns"]) + self._num_sums + np.arange(len(begins))
        self._num_sums += len(begins)
        return np.concatenate([index[:first], new]), depth[: first + len(begins)]

    def collect_sums(self) -> Columns:
        """Return the sums of all tracks."""
        return concatenate(self._sums)

    def _add_name(self, name: str) -> int:
        self._names.append(name)
        return len(self._names) - 1

    def _add_category(self) -> int:
        if OVERFLOW_CATEGORY not in self._categories:
            self._categories.append(OVERFLOW_CATEGORY)
        return self._categories.index(OVERFLOW_CATEGORY)


def _find_kinds(slices: Columns, categories: list[str], keys: list[Key], texts: TrackTexts) -> list[Kind]:
    """Return the kind of each key's track; those of Python stacks are split off later."""
    # A track is a GPU stream if most of its slices are GPU work, or if the metadata labels its process so.
    is_gpu_category = np.array([name in GPU_CATEGORIES for name in categories], dtype=bool)
    on_gpu = is_gpu_category[slices["category"]] if len(slices["category"]) else np.zeros(0, bool)
    num_slices = np.bincount(slices["key"], minlength=len(keys))
    gpu_share = np.bincount(slices["key"], weights=on_gpu, minlength=len(keys)) / np.maximum(num_slices, 1)
    gpu_processes = texts.gpu_processes
    kinds: list[Kind] = []
    for position, (process, thread) in enumerate(keys):
        if isinstance(thread, str) and thread.startswith(ASYNC_PREFIX):
            kinds.append("async")
        else:
            is_gpu = bool(gpu_share[position] > 0.5) or process in gpu_processes
            # Converters of Nsight Systems' reports write all work with category "cuda", on named streams.
            is_gpu |= isinstance(thread, str) and _STREAM.match(thread) is not None
            kinds.append("gpu" if is_gpu else "cpu")
    return kinds


def _order_keys(
    kinds: list[Kind], keys: list[Key], slices: Columns, is_frame: npt.NDArray[np.bool_]
) -> list[int]:
    """Return the keys in the order of their tracks."""
    # GPU streams come first, by number: they are the purpose of the trace, and stacks would push them out of
    # view. Then threads by busy time, so that the training thread comes first. Asynchronous work comes last.
    busy = np.bincount(slices["key"], weights=slices["duration_ns"] * ~is_frame, minlength=len(keys))
    streams = [index for index, kind in enumerate(kinds) if kind == "gpu"]
    streams.sort(key=lambda index: _stream_sort_key(*keys[index]))
    threads = sorted((i for i, kind in enumerate(kinds) if kind == "cpu"), key=lambda index: -busy[index])
    return [*streams, *threads, *(index for index, kind in enumerate(kinds) if kind == "async")]


def _name_keys(keys: list[Key], gpu: list[bool], texts: TrackTexts) -> list[str]:
    """Return a unique display name for each thread and stream of one rank."""
    # A number of a device or process is added to names only if there are several.
    devices = {process for (process, _), is_gpu in zip(keys, gpu, strict=True) if is_gpu}
    processes = {process for (process, _), is_gpu in zip(keys, gpu, strict=True) if not is_gpu}
    names = []
    for (process, thread), is_gpu in zip(keys, gpu, strict=True):
        number = _STREAM_PREFIX.sub("", str(thread)).strip()
        known = texts.thread_names.get((process, thread), "")
        if is_gpu:
            # Kineto names streams "stream 7 7", which repeats the number.
            name = f"stream {number}" if known.startswith("stream") or not known else known
            names.append(f"GPU {process} {name}" if len(devices) > 1 else name)
            continue
        name = known if known and known != number else f"CPU thread {number}"
        if number.startswith(ASYNC_PREFIX):
            name = number
        if known and str(thread) == str(process) and "main" not in known:
            name = f"main thread ({known})"  # on Linux the main thread's id is the pid
        if len(processes) > 1:
            name = f"{texts.process_names.get(process, 'process')} {process} {name}"
        names.append(name)
    duplicates = {name for name, count in Counter(names).items() if count > 1}
    return [
        f"{name} {str(thread).removeprefix('stream ').strip()}" if name in duplicates else name
        for name, (_, thread) in zip(names, keys, strict=True)
    ]


def _stream_sort_key(process: int | str, stream: int | str) -> tuple[str, float, str]:
    # torch before 1.11 wrote "stream 7" as the thread of a stream.
    number = _STREAM_PREFIX.sub("", str(stream)).strip()
    return (
        str(process).zfill(12),
        float(number) if number.isdigit() and len(number) < 20 else float("inf"),
        number,
    )
