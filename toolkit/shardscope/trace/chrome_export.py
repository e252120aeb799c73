"""One Chrome trace of all ranks, for Perfetto and chrome://tracing."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from shardscope.trace.loading.chunks import (
    ASYNC_INSTANT,
    COUNTER,
    FLOW_END,
    FLOW_START,
    FLOW_STEP,
    INSTANT,
)

if TYPE_CHECKING:
    from shardscope.trace.store import Trace

PHASES = {FLOW_START: "s", FLOW_STEP: "t", FLOW_END: "f", COUNTER: "C", INSTANT: "i", ASYNC_INSTANT: "n"}
"""Chrome's phases of marks (Trace Event Format, "Event Descriptions")."""
BATCH = 50_000


def write_chrome(trace: Trace, path: str | os.PathLike[str]) -> Path:
    """Write slices, flows, counters and instants of all ranks; see :meth:`Trace.to_chrome`."""
    target = Path(path)
    with target.open("wb") as file:
        if target.name.endswith(".gz"):
            with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=6) as packed:
                packed.writelines(iterate_chrome(trace))
        else:
            file.writelines(iterate_chrome(trace))
    return target


def iterate_chrome(trace: Trace) -> Iterator[bytes]:
    """Yield the file's text in pieces.

    A rank is a process, and each of its tracks a thread: process and thread numbers of different hosts may be
    the same.
    """
    # The number is for reading the file again, where all of it is one rank (loading/rank_file.py).
    yield b'{"displayTimeUnit":"ns","numMergedRanks":%d,"traceEvents":[' % len(trace.ranks)
    yield b",\n".join(json.dumps(event).encode() for event in _list_names(trace))
    # Chrome's times are not negative; marks may come before the first slice.
    shift = -min(int(trace.marks.time_ns.min()) if len(trace.marks) else 0, 0)
    names = [json.dumps(name).encode() for name in trace.names]
    categories = [json.dumps(name).encode() for name in trace.categories]
    pids = [track.rank for track in trace.tracks]
    for first in range(0, len(trace), BATCH):
        index = np.arange(first, min(first + BATCH, len(trace)))
        args = [b"{}"] * len(index)
        for position, text in trace.arguments.iterate(index):
            args[position] = _check_json(text)
        lines = []
        for name, category, track, start, duration, text in zip(
            trace.name_index[index].tolist(),
            trace.category_index[index].tolist(),
            trace.track_index[index].tolist(),
            (trace.start_ns[index] + shift).tolist(),
            trace.duration_ns[index].tolist(),
            args,
            strict=True,
        ):
            lines.append(
                b',\n{"ph":"X","cat":%b,"name":%b,"pid":%d,"tid":%d,"ts":%b,"dur":%b,"args":%b}'
                % (
                    categories[category],
                    names[name],
                    pids[track],
                    track,
                    _to_us(start),
                    _to_us(duration),
                    text,
                )
            )
        yield b"".join(lines)
    yield from _iterate_marks(trace, shift, names, categories)
    yield b"]}\n"


def _iterate_marks(trace: Trace, shift: int, names: list[bytes], categories: list[bytes]) -> Iterator[bytes]:
    marks = trace.marks
    index = marks.select(*PHASES)
    for position, text in marks.arguments.iterate(index):
        mark = index[position]
        phase = int(marks.phase[mark])
        rank = int(marks.rank_position[mark])
        track = int(marks.track_index[mark])
        more = b""
        if phase in (FLOW_START, FLOW_STEP, FLOW_END):
            # Ids are unique within a rank; "e" binds an end to the slice around it, as torch does.
            more = b',"id":"%d.%d"%b' % (
                rank,
                int(marks.id[mark]),
                b',"bp":"e"' if phase == FLOW_END else b"",
            )
        elif phase == ASYNC_INSTANT:
            more = b',"id":"%d.%d"' % (rank, int(marks.id[mark]))
        elif phase == INSTANT:
            more = b',"s":"t"'
        yield (
            b',\n{"ph":"%b","cat":%b,"name":%b,"pid":%d,"tid":%d,"ts":%b,"args":%b%b}'
            % (
                PHASES[phase].encode(),
                categories[marks.category_index[mark]],
                names[marks.name_index[mark]],
                trace.ranks[rank],
                max(track, 0),
                _to_us(int(marks.time_ns[mark]) + shift),
                _check_json(text),
                more,
            )
        )


def _list_names(trace: Trace) -> list[dict[str, object]]:
    """Return the metadata events that name and sort ranks and tracks."""
    events: list[dict[str, object]] = []
    for position, rank in enumerate(trace.ranks):
        for name, args in (
            ("process_name", {"name": f"rank {rank}"}),
            ("process_sort_index", {"sort_index": position}),
        ):
            events.append({"ph": "M", "name": name, "pid": rank, "tid": 0, "args": args})
    for number, track in enumerate(trace.tracks):
        for name, value in (
            ("thread_name", {"name": track.name}),
            ("thread_sort_index", {"sort_index": number}),
        ):
            events.append({"ph": "M", "name": name, "pid": track.rank, "tid": number, "args": value})
    return events


def _to_us(nanoseconds: int) -> bytes:
    """Return microseconds to the nanosecond, which a float of a long recording would round."""
    return b"%d.%03d" % divmod(nanoseconds, 1000)


def _check_json(text: bytes) -> bytes:
    """Return an event's arguments as they were recorded; an empty object if they are no JSON object."""
    try:
        raw = bytes(msgspec.json.decode(text, type=msgspec.Raw)) if text else b"{}"
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return b"{}"
    return raw if raw.startswith(b"{") else b"{}"
