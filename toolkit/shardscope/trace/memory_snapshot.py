"""Summary of a ``torch.cuda.memory`` snapshot: live allocations at the peak, and segments.

The file is a pickle, so it is read by an unpickler that rejects all globals: it creates only lists, dicts,
numbers and text, and calls nothing. The format is documented at ``torch.cuda.memory._snapshot``.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NoReturn

from shardscope.core.html_table import render_html_table
from shardscope.core.number_format import format_gib
from shardscope.trace.files import read_bytes, refuse_file

if TYPE_CHECKING:
    from shardscope.trace.memory_timeline import MemoryTimeline

BEFORE = "allocated before the history begins"
"""Place of allocations that were made before the history was recorded."""
Fields = Mapping[str, object]
NO_STACK = "no stack was kept"
SHOWN_FRAMES = 20
"""Number of places that a summary lists, largest first; the rest is one sum."""

_BROKEN = (
    pickle.UnpicklingError, EOFError, AttributeError, IndexError, KeyError, TypeError, ValueError,
    MemoryError, OverflowError, RecursionError,
)  # fmt: skip
"""Exceptions that bytes other than a valid pickle can raise."""


@dataclass(frozen=True, kw_only=True)
class LiveBytes:
    """Live bytes at the peak that were allocated at one place in the code."""

    frame: str
    """File, line and function of the innermost Python frame outside of torch, or of the innermost frame."""
    num_bytes: int
    num_allocations: int


@dataclass(frozen=True, kw_only=True)
class SegmentBytes:
    """One segment (``cudaMalloc``) of the caching allocator at the time of the snapshot."""

    kind: str
    """``large`` or ``small``; allocations of up to 1 MiB are in small segments."""
    stream: int
    total_bytes: int
    allocated_bytes: int
    """Bytes in use by tensors; the rest is cached or fragmented."""


@dataclass(frozen=True, kw_only=True)
class MemorySnapshot:
    """The summary of one rank's snapshot."""

    path: Path
    peak_bytes: int
    """Peak of allocated bytes during the recorded history."""
    at_peak: tuple[LiveBytes, ...]
    """Live bytes at the peak by place in the code, largest first; the rest is one entry at the end."""
    segments: tuple[SegmentBytes, ...]
    """Segments at the time of the snapshot, largest first."""
    num_events: int
    """Number of events in the history (allocations and frees)."""

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all segments, as nvidia-smi counts them."""
        return sum(segment.total_bytes for segment in self.segments)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of tensors in those segments."""
        return sum(segment.allocated_bytes for segment in self.segments)

    def timeline(self) -> MemoryTimeline:
        """Return the live bytes over the history by component, found by the frames of each allocation."""
        from shardscope.trace.memory_timeline import load_memory_timeline

        return load_memory_timeline(self.path)

    def _repr_html_(self) -> str:
        rows = [(live.frame, format_gib(live.num_bytes), live.num_allocations) for live in self.at_peak]
        caption = (
            f"{format_gib(self.peak_bytes)} GiB alive at the peak, of "
            f"{format_gib(self.reserved_bytes)} GiB reserved"
        )
        return render_html_table(("allocated at", "GiB", "allocations"), rows, caption)

    def __str__(self) -> str:
        lines = [
            f"{format_gib(self.peak_bytes)} GiB alive at the peak, of {format_gib(self.reserved_bytes)} "
            "GiB reserved:"
        ]
        lines += [
            f"  {format_gib(live.num_bytes)} GiB in {live.num_allocations:,}: {live.frame}"
            for live in self.at_peak
        ]
        return "\n".join(lines)


@dataclass
class Allocation:
    """One allocation that was live at some time of the history."""

    num_bytes: int
    frames: object
    begins: int
    """Index of its alloc event; -1: before the history."""
    ends: int
    """Index of its free event; the number of events if it was not freed."""


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler that rejects everything that could run code: classes, functions, persistent references."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"references {module_name}.{global_name}")

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError("refers to an object outside of it")


def load_memory_snapshot(path: str | Path) -> MemorySnapshot:
    """Read a snapshot file and summarize the device with the most memory in it.

    Raises ``ValueError`` for a file that is not a snapshot, is damaged, or references any global.
    """
    path = Path(path)
    segments, events = _read_history(path)
    peak, at_peak = _sum_at_peak(_list_allocations(path, segments, events), len(events))
    # The segments as they were when the snapshot was taken, which is usually after the peak.
    segment_sizes = [
        SegmentBytes(
            kind=str(segment.get("segment_type", "large")),
            stream=_read_number(path, segment, "stream", 0),
            total_bytes=_read_number(path, segment, "total_size"),
            allocated_bytes=_read_number(path, segment, "allocated_size"),
        )
        for segment in segments
    ]
    return MemorySnapshot(
        path=path,
        peak_bytes=peak,
        at_peak=at_peak,
        segments=tuple(sorted(segment_sizes, key=lambda segment: -segment.total_bytes)),
        num_events=len(events),
    )


def load_history(path: str | Path) -> tuple[list[Allocation], list[int] | None]:
    """Return the allocations of a snapshot, and the times of its events in microseconds, if it has them.

    Raises ``ValueError`` like :func:`load_memory_snapshot`.
    """
    path = Path(path)
    segments, events = _read_history(path)
    has_times = bool(events) and all("time_us" in event for event in events)
    times_us = [_read_number(path, event, "time_us") for event in events] if has_times else None
    return _list_allocations(path, segments, events), times_us


def _read_history(path: Path) -> tuple[list[Fields], list[Fields]]:
    """Return the segments and the events of the device with the most memory. Raises ``ValueError``."""
    # 1. Unpickle without running code, and check each part: the file may come from anybody.
    snapshot = _read_pickle(path)
    if not isinstance(snapshot, Mapping):
        _refuse_snapshot(path, f"holds a {type(snapshot).__name__}, not the dict of a memory snapshot")
    segments = _read_dicts(path, snapshot, "segments")
    # A snapshot may have segments of several devices: use the one with the most memory.
    device_bytes: dict[int, int] = {}
    for segment in segments:
        device = _read_number(path, segment, "device", 0)
        device_bytes[device] = device_bytes.get(device, 0) + _read_number(path, segment, "total_size")
    device = max(device_bytes, key=lambda number: device_bytes[number], default=0)
    segments = [segment for segment in segments if _read_number(path, segment, "device", 0) == device]
    # 2. The history of that device. Its list is empty if only the state was recorded, not the history.
    traces = snapshot.get("device_traces", [])
    if not isinstance(traces, list):
        _refuse_snapshot(path, "has no list of device_traces")
    events = _check_dicts(path, traces[device], "device_traces") if device < len(traces) else []
    return segments, events


_SHORT_TEXT = b"|".join(re.escape(bytes([size])) + b".{%d}" % size for size in range(256))
_FIXED_OPCODES = re.compile(
    rb"(?:[\x81\x94\x85\x86\x87\x88\x89\x8f-\x93\x97\x98()0-2NQRabdelostu\]}]"  # without an argument
    rb"|[hqK].|\x80.|M.{2}|[Jj].{4}|r..[\x00-\x3f]\x00|[G\x95].{8}|[\x8aU\x8cC](?:%b))*+" % _SHORT_TEXT,
    re.DOTALL,
)
"""A run of opcodes (CPython, Lib/pickle.py) of which none can make the memo large."""
_SIZE_BYTES = {b"\x8b": 4, b"X": 4, b"T": 4, b"B": 4, b"\x8d": 8, b"\x8e": 8, b"\x96": 8}
"""Opcodes followed by the size of their text or bytes, and the bytes of that size."""


def _check_memo(data: bytes) -> None:
    """Raise ``UnpicklingError`` if the memo would need more entries than the file can fill.

    The unpickler allocates the memo up to the largest index at once: a file of 20 bytes takes gigabytes.
    """
    place = 0
    while True:
        run = _FIXED_OPCODES.match(data, place)
        assert run is not None, "it may be empty"
        place = run.end()
        opcode = data[place : place + 1]
        if opcode in _SIZE_BYTES:
            start = place + 1 + _SIZE_BYTES[opcode]
            place = start + int.from_bytes(data[place + 1 : start], "little")
        elif opcode == b"r":
            index = int.from_bytes(data[place + 1 : place + 5], "little")
            place += 5
            _check_memo_index(index, data)
        elif opcode and opcode in b"IFLSVgPp":
            end = data.find(b"\n", place)
            if opcode == b"p" and end > 0:
                _check_memo_index(int(data[place + 1 : end]), data)
            place = end + 1 or len(data)
        else:
            return  # The end, or an opcode that the unpickler refuses: it reads no further than here.


def _check_memo_index(index: int, data: bytes) -> None:
    # An entry takes at least two bytes: the object's opcode, and the one that puts it into the memo.
    if index > len(data) // 2:
        raise pickle.UnpicklingError(f"has {len(data):,} bytes and refers to memo entry {index:,}")


def _read_pickle(path: Path) -> object:
    try:
        data = read_bytes(path)
        _check_memo(data)
        return _PlainUnpickler(io.BytesIO(data)).load()
    except _BROKEN as error:
        # read_bytes' own error already names the file and a fix.
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        _refuse_snapshot(path, f"is no memory snapshot ({str(error) or type(error).__name__})")


def _list_allocations(path: Path, segments: Sequence[Fields], events: Sequence[Fields]) -> list[Allocation]:
    """Return all allocations that were live at some time of the history."""
    allocations: list[Allocation] = []
    alive: dict[int, Allocation] = {}
    # Match each free with its alloc by address. A free without one was allocated before the history.
    for index, event in enumerate(events):
        action = event.get("action")
        if action not in ("alloc", "free_requested"):
            continue
        address, num_bytes = _read_number(path, event, "addr"), _read_number(path, event, "size")
        if action == "alloc":
            alive[address] = Allocation(num_bytes, event.get("frames"), index, len(events))
            allocations.append(alive[address])
        elif known := alive.pop(address, None):
            known.ends = index
        else:
            allocations.append(Allocation(num_bytes, BEFORE, -1, index))
    # Active blocks without an alloc event were allocated before the history and never freed.
    for segment in segments:
        place = _read_number(path, segment, "address", 0)
        for block in _read_dicts(path, segment, "blocks"):
            address = _read_number(path, block, "address", place)
            size = _read_number(path, block, "size")
            place = address + size
            if block.get("state") == "active_allocated" and address not in alive:
                num_bytes = _read_number(path, block, "requested_size", size)
                allocations.append(Allocation(num_bytes, block.get("frames") or BEFORE, -1, len(events)))
    return allocations


def _sum_at_peak(allocations: Sequence[Allocation], num_events: int) -> tuple[int, tuple[LiveBytes, ...]]:
    """Return the peak in bytes, and the live bytes at the peak by place in the code."""
    # A running sum over the net change of bytes at each event gives the peak.
    changes = [0] * (num_events + 2)
    for allocation in allocations:
        changes[allocation.begins + 1] += allocation.num_bytes
        changes[allocation.ends + 1] -= allocation.num_bytes
    now = peak = when = 0
    for index, change in enumerate(changes):
        now += change
        if now > peak:
            peak, when = now, index
    # Then add up what was alive at that event, by the place in the code that allocated it.
    bytes_by_frame: dict[str, list[int]] = {}
    for allocation in allocations:
        if allocation.begins + 1 <= when < allocation.ends + 1:
            sizes = bytes_by_frame.setdefault(_format_frame(allocation.frames), [0, 0])
            sizes[0] += allocation.num_bytes
            sizes[1] += 1
    largest = sorted(bytes_by_frame.items(), key=lambda item: -item[1][0])
    shown, rest = largest[:SHOWN_FRAMES], largest[SHOWN_FRAMES:]
    if rest:
        sums = [sum(numbers[column] for _, numbers in rest) for column in (0, 1)]
        shown.append((f"{len(rest):,} other places", sums))
    return peak, tuple(
        LiveBytes(frame=frame, num_bytes=numbers[0], num_allocations=numbers[1]) for frame, numbers in shown
    )


def _format_frame(frames: object) -> str:
    if isinstance(frames, str):
        return frames
    if not isinstance(frames, list) or not frames:
        return NO_STACK
    frames_with_data = [frame for frame in frames if isinstance(frame, Mapping)]
    python_frames = [frame for frame in frames_with_data if str(frame.get("filename", "")).endswith(".py")]
    # The user's line says more than torch's: prefer the innermost frame outside of torch.
    user_frames = [
        frame for frame in python_frames if "torch" not in PurePosixPath(str(frame["filename"])).parts
    ]
    for frame in (*user_frames[:1], *python_frames[:1], *frames_with_data[:1]):
        file = PurePosixPath(str(frame.get("filename", "?")))
        return f"{'/'.join(file.parts[-2:])}:{frame.get('line', 0)} {frame.get('name', '?')}"
    return NO_STACK


def _read_dicts(path: Path, parent: Fields, key: str) -> list[Fields]:
    return _check_dicts(path, parent.get(key), key)


def _check_dicts(path: Path, entries: object, name: str) -> list[Fields]:
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        _refuse_snapshot(path, f"has no list of dicts as {name}")
    return entries


def _read_number(path: Path, parent: Fields, key: str, default: int | None = None) -> int:
    value = parent.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        _refuse_snapshot(path, f"has no whole number as {key}")
    return value


def _refuse_snapshot(path: Path, what: str) -> NoReturn:
    refuse_file(path, what, "take the snapshot again: Pretrain(memory_snapshot=True)")
