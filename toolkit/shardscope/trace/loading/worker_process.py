"""Process that reads trace files, or decodes chunks of one, for another: ``python -m`` of this module.

It reads requests from standard input and writes one answer each to standard output, until its input ends.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path
from typing import BinaryIO

import msgspec

from shardscope.trace.loading.cache import write_cache, write_rank_file
from shardscope.trace.loading.chunks import decode_chunk
from shardscope.trace.loading.column_format import pack_chunk
from shardscope.trace.loading.messages import (
    CHUNK,
    FILE,
    PROBLEM,
    PROGRESS,
    FileRequest,
    receive_message,
    send_message,
)
from shardscope.trace.loading.rank_file import read_rank

_REPORT_SECONDS = 0.1


def main() -> None:
    """Answer requests until standard input ends."""
    # Events are many objects without cycles: looking for cycles takes a sixth of the time.
    gc.disable()
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # What anything prints must not get between the answers.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    while True:
        kind, data = receive_message(requests)
        if kind == CHUNK:
            send_message(answers, CHUNK, pack_chunk(decode_chunk(data)))
        elif kind == FILE:
            _answer_file(msgspec.json.decode(data, type=FileRequest), answers)
        else:
            return


def _answer_file(request: FileRequest, answers: BinaryIO) -> None:
    path = Path(request.path)
    last_report = time.monotonic()

    def note_bytes(num_bytes: int) -> None:
        nonlocal last_report
        if time.monotonic() - last_report > _REPORT_SECONDS:
            last_report = time.monotonic()
            send_message(answers, PROGRESS, [num_bytes.to_bytes(8, "little")])

    try:
        rank = read_rank(path, note_bytes)
    except ValueError as problem:
        send_message(answers, PROBLEM, [str(problem).encode(errors="replace")])
        return
    cache = write_cache(path, rank) if request.write_cache else None
    if cache is not None:
        send_message(answers, FILE, [os.fsencode(cache)])
        return
    write_rank_file(Path(request.output), rank)
    send_message(answers, FILE, [os.fsencode(request.output)])


if __name__ == "__main__":
    main()
