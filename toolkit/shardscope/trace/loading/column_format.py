"""Columns and their texts as bytes, for caches and for messages between processes.

The format is a line of JSON with the texts and the place of each array, then the arrays. Nothing in it is
executed, and :func:`unpack_rank` checks that every index is in range.
"""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from shardscope.trace.loading.chunks import Chunk, ChunkTexts, Int64s
from shardscope.trace.loading.document import read_small_int
from shardscope.trace.loading.pairs import Columns
from shardscope.trace.loading.rank_columns import MARK_COLUMNS, SLICE_COLUMNS, RankColumns, RankTexts
from shardscope.trace.nesting import MAX_ROWS

FORMAT = b"shardscope trace columns 3\n"
"""First line of the format; a change of columns or of what they mean changes its number."""
_ALIGNMENT = 64
_MAX_HEADER_BYTES = 2**30
Data = bytes | memoryview


class ColumnError(ValueError):
    """The error for bytes that are not columns, or are damaged."""


class _Array(msgspec.Struct):
    name: str
    kind: str
    offset: int
    num_bytes: int
    checksum: int


class _Header(msgspec.Struct):
    texts: msgspec.Raw
    arrays: list[_Array]


def pack_columns(texts: ChunkTexts | RankTexts, arrays: dict[str, Int64s], rest: Data) -> list[Data]:
    """Return pieces of bytes that :func:`unpack_columns` reads: texts, arrays by name, and other bytes."""
    places: list[_Array] = []
    pieces: list[Data] = []
    offset = 0

    def add(name: str, kind: str, data: Data, checksum: int) -> None:
        nonlocal offset
        padding = -offset % _ALIGNMENT
        pieces.extend([bytes(padding), data])
        places.append(_Array(name, kind, offset + padding, len(data), checksum))
        offset += padding + len(data)

    for name, array in arrays.items():
        data = memoryview(np.ascontiguousarray(array).data).cast("B") if len(array) else b""
        add(name, array.dtype.str, data, zlib.crc32(data))
    # Blocks of arguments are checked when they are decompressed.
    add("", "", rest, 0)
    header = msgspec.json.encode(_Header(msgspec.Raw(msgspec.json.encode(texts)), places)) + b"\n"
    header += b" " * (-(len(FORMAT) + 8 + len(header)) % _ALIGNMENT)
    return [FORMAT, len(header).to_bytes(8, "little"), header, *pieces]


Texts = TypeVar("Texts", ChunkTexts, RankTexts)


def unpack_columns(data: memoryview, kind: type[Texts]) -> tuple[Texts, dict[str, Int64s], memoryview]:
    """Return texts, arrays and other bytes, all views of ``data``. Raises :class:`ColumnError`."""
    begin = len(FORMAT) + 8
    if bytes(data[: len(FORMAT)]) != FORMAT:
        raise ColumnError("of another format")
    header_bytes = int.from_bytes(data[len(FORMAT) : begin], "little")
    body = data[begin + header_bytes :] if header_bytes <= _MAX_HEADER_BYTES else data[:0]
    rest = data[:0]
    arrays: dict[str, Int64s] = {}
    try:
        header = msgspec.json.decode(data[begin : begin + header_bytes], type=_Header)
        texts = msgspec.json.decode(header.texts, type=kind)
        for place in header.arrays:
            part = body[place.offset : place.offset + place.num_bytes]
            if place.offset < 0 or len(part) != place.num_bytes:
                raise ColumnError("truncated")
            if not place.name:
                rest = part
            elif zlib.crc32(part) != place.checksum or place.kind not in _KINDS:
                raise ColumnError("damaged")
            else:
                arrays[place.name] = np.frombuffer(part, np.dtype(place.kind))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError) as error:
        raise ColumnError(f"damaged: {error}") from None
    return texts, arrays, rest


_KINDS = ("<i8", "<i4", "<i2", "|u1")


def pack_chunk(chunk: Chunk) -> list[Data]:
    """Return a chunk as bytes."""
    blocks = np.array(chunk.block_bytes, np.int64)
    return pack_columns(chunk.texts, chunk.columns | {"block_bytes": blocks}, chunk.arguments)


def unpack_chunk(data: memoryview) -> Chunk:
    """Return the chunk of another process."""
    texts, columns, rest = unpack_columns(data, ChunkTexts)
    blocks = columns.pop("block_bytes").tolist()
    return Chunk(texts=texts, columns=columns, arguments=bytes(rest), block_bytes=blocks)


def pack_rank(rank: RankColumns) -> list[Data]:
    """Return a rank as bytes."""
    arrays = {f"slices.{name}": column for name, column in rank.slices.items()}
    arrays |= {f"marks.{name}": column for name, column in rank.marks.items()}
    return pack_columns(rank.texts, arrays, rank.argument_bytes)


def unpack_rank(data: memoryview, path: Path) -> RankColumns:
    """Return a rank of a cache or another process. Raises :class:`ColumnError` for indices out of range."""
    texts, arrays, rest = unpack_columns(data, RankTexts)
    expected = [*(f"slices.{name}" for name in SLICE_COLUMNS), *(f"marks.{name}" for name in MARK_COLUMNS)]
    if set(arrays) != set(expected):
        raise ColumnError("other columns")
    slices = {name: arrays[f"slices.{name}"] for name in SLICE_COLUMNS}
    marks = {name: arrays[f"marks.{name}"] for name in MARK_COLUMNS}
    _check_rank(texts, slices, marks, len(rest))
    return RankColumns(path=path, texts=texts, slices=slices, marks=marks, argument_bytes=rest)


def _check_rank(texts: RankTexts, slices: Columns, marks: Columns, num_bytes: int) -> None:
    """Raise :class:`ColumnError` for columns that would fail later: a cache may come from someone else."""
    num_events = sum(texts.block_events)
    limits = {
        "name": len(texts.names),
        "category": len(texts.categories),
        "track": len(texts.tracks),
        "key": len(texts.keys),
        "row": num_events,
        "depth": max((track.num_rows for track in texts.tracks), default=0),
    }
    for columns in (slices, marks):
        if len({len(column) for column in columns.values()}) != 1:
            raise ColumnError("columns of different lengths")
        for name, limit in limits.items():
            if name in columns and len(columns[name]):
                lowest = -1 if name == "row" or (name == "track" and columns is marks) else 0
                if int(columns[name].min()) < lowest or int(columns[name].max()) >= limit:
                    raise ColumnError(f"{name} out of range")
    _check_order(slices)
    for name in ("start_ns", "duration_ns"):
        if len(slices[name]) and int(np.abs(slices[name]).max()) >= 2**62:
            raise ColumnError("times out of range")
    is_negative = len(slices["duration_ns"]) and int(slices["duration_ns"].min()) < 0
    counts: Sequence[int] = [*texts.block_events, *texts.block_bytes]
    if is_negative or min(counts, default=0) < 0 or sum(texts.block_bytes) != num_bytes:
        raise ColumnError("sizes out of range")
    tracks = texts.tracks
    if len(texts.block_events) != len(texts.block_bytes) or not all(
        0 <= track.key < len(texts.keys) and 1 <= track.num_rows <= MAX_ROWS + 1 for track in tracks
    ):
        raise ColumnError("tracks out of range")
    num_rows = np.array([track.num_rows for track in tracks], np.int64)
    if len(slices["depth"]) and bool(np.any(slices["depth"] >= num_rows[slices["track"]])):
        raise ColumnError("rows out of range")
    documents = [texts.document, *(merged.document for merged in texts.document.merged_ranks)]
    for number in (number for document in documents for number in (document.rank, document.world_size)):
        if number is not None and read_small_int(number) is None:
            raise ColumnError("ranks out of range")


def _check_order(slices: Columns) -> None:
    """Raise :class:`ColumnError` unless slices are sorted by track, row and start, without overlaps."""
    track, depth, start = (slices[name].astype(np.int64) for name in ("track", "depth", "start_ns"))
    row = track * 2**16 + depth
    same = row[1:] == row[:-1]
    ends = start + slices["duration_ns"]
    if bool(np.any(row[1:] < row[:-1]) or np.any(same & (start[1:] < ends[:-1]))):
        raise ColumnError("slices out of order")


def map_file(handle: int) -> memoryview:
    """Return the content of an open file, which the system reads when it is used."""
    size = os.fstat(handle).st_size
    return memoryview(mmap.mmap(handle, size, access=mmap.ACCESS_READ)) if size else memoryview(b"")
