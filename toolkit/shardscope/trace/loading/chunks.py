"""The events of one chunk as columns: numbers in numpy, texts as indices, arguments as compressed blocks."""

from __future__ import annotations

import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable
from operator import attrgetter
from typing import TypeVar, cast

import msgspec
import numpy as np
import numpy.typing as npt

from shardscope.trace.categories import GPU_CATEGORIES, RUNTIME_CATEGORIES
from shardscope.trace.loading.document import MAX_NAME_CHARACTERS
from shardscope.trace.loading.events import Event, decode_events
from shardscope.trace.loading.splitting import UNREADABLE

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Key = tuple[int | str, int | str]
"""Process and thread of an event, as written."""

SLICE, BEGIN, END, ASYNC_BEGIN, ASYNC_INSTANT, ASYNC_END = 1, 2, 3, 4, 5, 6
FLOW_START, FLOW_STEP, FLOW_END, COUNTER, INSTANT = 7, 8, 9, 10, 11
PHASES = {
    "X": SLICE,
    "B": BEGIN,
    "E": END,
    "b": ASYNC_BEGIN,
    "n": ASYNC_INSTANT,
    "e": ASYNC_END,
    "s": FLOW_START,
    "t": FLOW_STEP,
    "f": FLOW_END,
    "C": COUNTER,
    "i": INSTANT,
    "I": INSTANT,
}
"""Chrome's phases as numbers of a column. Metadata (M) names tracks and is no row."""

ABSENT = int(np.iinfo(np.int64).min)
"""Value of ``start_ns`` and ``duration_ns`` that are missing or unreadable."""
BLOCK_EVENTS = 4096
"""Events of one block of arguments: a click decompresses a block, so it must not be large."""
CORRELATED_CATEGORIES = GPU_CATEGORIES | RUNTIME_CATEGORIES
"""Categories whose arguments have a correlation id, which links a kernel to the call that launched it."""
UNKNOWN_PHASE = "events of an unknown kind left out"
_NUMBERED_NAME = re.compile(r"thread \S+ \((.*)\)")
_MAX_NS = 2.0**61
_MAX_US = _MAX_NS / 1e3


class ChunkTexts(msgspec.Struct, kw_only=True):
    """Texts of one chunk. Columns have indices into names, categories and keys."""

    names: list[str]
    categories: list[str]
    keys: list[Key]
    thread_names: list[tuple[int | str, int | str, str]] = []
    process_names: list[tuple[int | str, str]] = []
    process_labels: list[tuple[int | str, str]] = []
    oddities: dict[str, int] = {}


class Chunk(msgspec.Struct, kw_only=True):
    """Events of one chunk in file order. All columns have one entry per event that is no metadata."""

    texts: ChunkTexts
    columns: dict[str, Int64s]
    """``phase`` (uint8), ``start_ns`` from ts 0 and ``duration_ns`` (int64, ABSENT without one), ``name``,
    ``category`` and ``key`` (int32), ``id`` (int64, -1 without one: correlation of work, else of a flow)."""
    arguments: bytes
    """Compressed blocks of :data:`BLOCK_EVENTS` events each."""
    block_bytes: list[int]


def as_integers(column: npt.NDArray[np.int16 | np.int32 | np.uint8]) -> Int64s:
    """Return a column as the type of all integer columns, whatever its number of bytes."""
    return cast(Int64s, column)


def decode_chunk(text: bytes) -> Chunk:
    """Decode the events of ``text``, which are separated by commas."""
    oddities: Counter[str] = Counter()
    events = decode_events(text, oddities)
    metadata: list[Event] = []
    codes = list(map(PHASES.get, map(attrgetter("ph"), events)))
    # Category "Trace" is the profiler's record of its own window, not work of the rank.
    if None in codes or "Trace" in set(map(attrgetter("cat"), events)):
        metadata = [event for event in events if event.ph == "M"]
        rows = [event for event in events if event.ph in PHASES and event.cat != "Trace"]
        num_windows = sum(event.cat == "Trace" and event.ph in PHASES for event in events)
        unknown = len(events) - len(metadata) - len(rows) - num_windows
        if unknown:
            oddities[UNKNOWN_PHASE] += unknown
        codes = [PHASES[event.ph] for event in rows]
    else:
        rows = events
    names, name = _index_texts(map(attrgetter("name"), rows), len(rows))
    categories, category = _index_texts(map(attrgetter("cat"), rows), len(rows))
    keys, key = _index_texts(map(attrgetter("pid", "tid"), rows), len(rows))
    arguments, block_bytes = _pack_arguments(rows)
    columns = {
        "phase": as_integers(np.array(codes, np.uint8)),
        "start_ns": _to_ns(np.array([event.ts for event in rows], np.float64)),
        "duration_ns": _read_durations(np.array([event.dur for event in rows], np.float64)),
        "name": as_integers(name),
        "category": as_integers(category),
        "key": as_integers(key),
        "id": _read_ids(rows),
    }
    texts = ChunkTexts(names=names, categories=categories, keys=keys)
    _read_metadata(metadata, texts)
    texts.oddities = dict(oddities)
    return Chunk(texts=texts, columns=columns, arguments=arguments, block_bytes=block_bytes)


Text = TypeVar("Text", str, Key)


def _index_texts(values: Iterable[Text], count: int) -> tuple[list[Text], Int32s]:
    """Return the different values in order and the index of each one."""
    known: defaultdict[Text, int] = defaultdict()
    known.default_factory = known.__len__  # a new value gets the next index
    index = np.fromiter(map(known.__getitem__, values), np.int32, count)
    return list(known), index


def _to_ns(time_us: Floats) -> Int64s:
    """Return microseconds as whole nanoseconds, and ABSENT for missing and absurd ones."""
    # Nanoseconds since 1970 exceed float64's 53 bits, so integer part and fraction are scaled separately.
    readable = np.abs(time_us) < _MAX_US  # False for NaN
    time_us = np.where(readable, time_us, 0.0)
    whole_us = np.floor(time_us)
    fraction_ns = np.rint((time_us - whole_us) * 1000).astype(np.int64)
    return np.where(readable, whole_us.astype(np.int64) * 1000 + fraction_ns, ABSENT)


def _read_durations(time_us: Floats) -> Int64s:
    """Return durations in nanoseconds, negative ones too; ABSENT for missing ones."""
    duration_ns = np.clip(np.rint(np.nan_to_num(time_us) * 1000), -_MAX_NS, _MAX_NS).astype(np.int64)
    return np.where(np.isnan(time_us), ABSENT, duration_ns)


def _pack_arguments(rows: list[Event]) -> tuple[bytes, list[int]]:
    """Return the arguments in compressed blocks, separated by NUL, which JSON cannot contain."""
    args = list(map(attrgetter("args"), rows))
    blocks = [
        zlib.compress(b"\0".join(args[first : first + BLOCK_EVENTS]), 1)
        for first in range(0, len(args), BLOCK_EVENTS)
    ]
    return b"".join(blocks), [len(block) for block in blocks]


class _Correlation(msgspec.Struct, gc=False):
    correlation: int = -1


_CORRELATION = msgspec.json.Decoder(_Correlation, strict=False)


def _read_ids(rows: list[Event]) -> Int64s:
    """Return the id of each event: the correlation id of work and launches, else the id that it carries."""
    decode = _CORRELATION.decode
    ids = np.full(len(rows), -1, np.int64)
    for position, event in enumerate(rows):
        if event.ph in ("X", "B"):
            if event.cat in CORRELATED_CATEGORIES:
                try:
                    number = decode(event.args).correlation
                except UNREADABLE:
                    continue
                if -1 <= number < 2**62:
                    ids[position] = number
        else:
            ids[position] = _read_id(bytes(event.id) or bytes(event.id2))
    return ids


def _read_id(text: bytes) -> int:
    """Return a number for the id of a flow or of asynchronous work, which may be any JSON value."""
    if not text:
        return -1
    if text.isdigit() and len(text) < 19:
        return int(text)
    # Other ids ("0x1f", {"local": "0x1"}) only have to be equal where they are equal.
    return 2**61 + zlib.crc32(text)


def _read_metadata(metadata: Iterable[Event], texts: ChunkTexts) -> None:
    """Add the names of processes and threads, and the labels of processes."""
    for event in metadata:
        if event.name == "process_labels":
            labels = bytes(event.args)[:MAX_NAME_CHARACTERS].decode(errors="replace")
            texts.process_labels.append((event.pid, labels))
        elif event.name in ("process_name", "thread_name") and (text := _read_name(event)):
            if event.name == "process_name":
                texts.process_names.append((event.pid, text))
            else:
                texts.thread_names.append((event.pid, event.tid, _parse_thread_name(text)))


class _NameArgs(msgspec.Struct):
    name: str = ""


_NAME = msgspec.json.Decoder(_NameArgs)


def _read_name(event: Event) -> str:
    try:
        return _NAME.decode(event.args).name.strip()[:MAX_NAME_CHARACTERS]
    except UNREADABLE:
        return ""


def _parse_thread_name(text: str) -> str:
    """Return the OS name of a thread, which Kineto writes as ``thread 123 (pt_autograd_0)``."""
    numbered = _NUMBERED_NAME.fullmatch(text)
    return numbered.group(1).strip() if numbered else text
