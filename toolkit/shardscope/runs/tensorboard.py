"""Metrics as TensorBoard reads them, without its package: a file of scalars per rank, one event per line.

The format is TFRecord (tensorflow/core/lib/io/record_writer.cc) around the protobuf Event
(tensorboard/compat/proto/event.proto and summary.proto): length, its CRC-32C, data, its CRC-32C.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardscope.records.regular_files import open_to_append
from shardscope.runs.records import finite_or_special

NOT_METRICS = ("step", "rank", "time")
MAX_STEP = 2**63 - 1


class ScalarFile:
    """The event file of one rank, made with its first line. Lines without a number leave no event."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path: Path | None = None

    def append(self, records: list[dict[str, Any]]) -> None:
        """Raises ``OSError``."""
        events = [event for record in records if (event := scalars(record))]
        if not events:
            return
        data = b"".join(map(framed, events))
        if self._path is None:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            self._path = self.folder / f"events.out.tfevents.{int(time.time())}.shardscope"
            data = framed(_version(time.time())) + data
        with open_to_append(self._path) as file:
            file.write(data)


def scalars(record: Mapping[str, Any]) -> bytes:
    """An Event with one value for each number of a line of metrics; empty if it has none."""
    step, when = record.get("step"), record.get("time")
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= MAX_STEP:
        return b""
    values = b"".join(
        _field(1, _field(1, name.encode()) + _tag(2, 5) + struct.pack("<f", _single(value)))
        for name, value in _numbers(record)
    )
    if not values:
        return b""
    seconds = when if isinstance(when, int | float) else 0.0
    return _tag(1, 1) + struct.pack("<d", seconds) + _tag(2, 0) + _varint(step) + _field(5, values)


def framed(data: bytes) -> bytes:
    """One TFRecord."""
    length = struct.pack("<Q", len(data))
    return length + _masked(length) + data + _masked(data)


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli), RFC 3720 appendix B.4."""
    value = 0xFFFFFFFF
    for byte in data:
        value = _TABLE[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


def _numbers(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        number = finite_or_special(value)
        if name not in NOT_METRICS and isinstance(number, int | float) and not isinstance(number, bool):
            yield str(name), float(number) if abs(number) < 1e308 or number != number else math.inf * number


def _single(value: float) -> float:
    """``struct`` refuses what single precision has no room for."""
    return math.copysign(math.inf, value) if abs(value) > 3.4028234e38 else value


def _version(when: float) -> bytes:
    return _tag(1, 1) + struct.pack("<d", when) + _field(3, b"brain.Event:2")


def _field(number: int, data: bytes) -> bytes:
    return _tag(number, 2) + _varint(len(data)) + data


def _tag(number: int, wire_type: int) -> bytes:
    return bytes([number << 3 | wire_type])


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _entry(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_TABLE = tuple(map(_entry, range(256)))
