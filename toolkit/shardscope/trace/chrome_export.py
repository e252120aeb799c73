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
from shardscope.trace.loading.document import Document, MergedRank, MergedThread

if TYPE_CHECKING:
    from shardscope.trace.marks import Marks
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
    threads = _number_threads(trace.marks, len(trace.tracks))
    # For reading the file again (loading/merged_file.py).
    yield b'{"displayTimeUnit":"ns","mergedRanks":%b,"traceEvents":[' % msgspec.json.encode(
        _describe_ranks(trace, threads)
    )
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
    yield from _iterate_marks(trace, shift, names, categories, threads)
    yield b"]}\n"


Threads = dict[tuple[int, int], int]
"""Numbers of threads that have marks and no track, by the position of the rank and the index in ``keys``."""


def _number_threads(marks: Marks, first: int) -> Threads:
    places = np.flatnonzero(marks.track_index < 0)
    owners = zip(marks.rank_position[places].tolist(), marks.key_index[places].tolist(), strict=True)
    return {owner: first + number for number, owner in enumerate(dict.fromkeys(owners))}


def _describe_ranks(trace: Trace, threads: Threads) -> list[MergedRank]:
    """Return the facts of each rank's own file, and its processes and threads by their numbers here."""
    ranks = []
    for position, rank in enumerate(trace.ranks):
        tracks = [
            MergedThread(
                number=number, process=track.process, thread=track.thread, kind=track.kind, name=track.name
            )
            for number, track in enumerate(trace.tracks)
            if track.rank == rank
        ]
        others = []
        for (owner, key), number in threads.items():
            if owner == position:
                process, thread = trace.marks.keys[key]
                others.append(MergedThread(number=number, process=process, thread=thread))
        devices = {thread.process for thread in tracks if thread.kind == "gpu"}
        document = Document(
            rank=rank,
            world_size=trace.world_size,
            process_groups=trace.process_groups[rank],
            device_names={
                device: trace.device_names[rank]
                for device in devices
                if isinstance(device, int) and rank in trace.device_names
            },
            is_cut_off=rank in trace.cut_off,
        )
        ranks.append(MergedRank(document=document, threads=tracks + others))
    return ranks


def _iterate_marks(
    trace: Trace, shift: int, names: list[bytes], categories: list[bytes], threads: Threads
) -> Iterator[bytes]:
    marks = trace.marks
    index = marks.select(*PHASES)
    # Ids are unique within a rank, and numbers are read exactly: other texts only as their hash.
    owned_ids = np.stack([marks.rank_position.astype(np.int64), marks.id])
    ids = np.unique(owned_ids, axis=1, return_inverse=True)[1].reshape(-1)
    for position, text in marks.arguments.iterate(index):
        mark = index[position]
        phase = int(marks.phase[mark])
        rank = int(marks.rank_position[mark])
        track = int(marks.track_index[mark])
        more = b""
        if phase in (FLOW_START, FLOW_STEP, FLOW_END):
            # "e" binds an end to the slice around it, as torch does.
            more = b',"id":%d%b' % (ids[mark], b',"bp":"e"' if phase == FLOW_END else b"")
        elif phase == ASYNC_INSTANT:
            more = b',"id":%d' % ids[mark]
        elif phase == INSTANT:
            more = b',"s":"t"'
        yield (
            b',\n{"ph":"%b","cat":%b,"name":%b,"pid":%d,"tid":%d,"ts":%b,"args":%b%b}'
            % (
                PHASES[phase].encode(),
                categories[marks.category_index[mark]],
                names[marks.name_index[mark]],
                trace.ranks[rank],
                track if track >= 0 else threads[rank, int(marks.key_index[mark])],
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
