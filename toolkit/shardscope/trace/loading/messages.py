"""Messages between this process and those that read for it: a kind, the number of bytes, and these bytes."""

from __future__ import annotations

from typing import IO

import msgspec

from shardscope.trace.loading.column_format import Data

CHUNK, FILE, PROGRESS, PROBLEM = b"C", b"F", b"P", b"E"


class FileRequest(msgspec.Struct):
    """A trace file to read."""

    path: str
    output: str
    """File for its columns, if they do not go into a cache."""
    write_cache: bool


def send_message(pipe: IO[bytes], kind: bytes, pieces: list[Data]) -> None:
    """Write one message. Raises ``OSError`` if the other process ended."""
    pipe.write(kind + sum(map(len, pieces)).to_bytes(8, "little"))
    for piece in pieces:
        pipe.write(piece)
    pipe.flush()


def receive_message(pipe: IO[bytes]) -> tuple[bytes, bytes]:
    """Return the kind and the bytes of the next message; no kind at the end of the pipe."""
    head = pipe.read(9)
    if len(head) < 9:
        return b"", b""
    size = int.from_bytes(head[1:], "little")
    data = pipe.read(size)
    return (head[:1], data) if len(data) == size else (b"", b"")
