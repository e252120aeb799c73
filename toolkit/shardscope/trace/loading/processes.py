"""Worker processes that read several trace files, or the chunks of one, in parallel.

One thread waits for each process. The processes exit when this one does, because their standard input closes.
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Self

import msgspec

from shardscope.machine.python_process import build_import_path, build_module_command
from shardscope.trace.loading.cache import read_rank_file
from shardscope.trace.loading.chunks import Chunk
from shardscope.trace.loading.column_format import unpack_chunk
from shardscope.trace.loading.messages import (
    CHUNK,
    FILE,
    PROBLEM,
    PROGRESS,
    FileRequest,
    receive_message,
    send_message,
)
from shardscope.trace.loading.rank_columns import RankColumns

MAX_PROCESSES = 8


def count_processes() -> int:
    """Return the number of processes to start: one per available processor, at most eight."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # An interpreter that is embedded in a program has no executable to start.
    return min(processors, MAX_PROCESSES) if sys.executable else 1


class WorkerPool:
    """Processes that read files and decode chunks; leaving the context ends them."""

    def __init__(self, num_processes: int) -> None:
        self._workers = [_start_worker() for _ in range(num_processes)]
        self._idle: queue.Queue[subprocess.Popen[bytes]] = queue.Queue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(num_processes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Killed, so that a thread that waits for an answer sees the end of its pipe.
        for worker in self._workers:
            worker.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._workers:
            worker.wait()
            for pipe in (worker.stdin, worker.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()

    def decode(self, texts: Iterable[bytes]) -> Iterator[Chunk]:
        """Decode chunks in order, as many at once as there are processes."""
        futures: list[Future[Chunk]] = []
        for text in texts:
            futures.append(self._threads.submit(self._decode_chunk, text))
            if len(futures) > len(self._workers):
                yield futures.pop(0).result()
        for future in futures:
            yield future.result()

    def read_files(
        self, paths: list[Path], note_bytes: Callable[[Path, int], None], *, write_caches: bool
    ) -> list[RankColumns | ValueError]:
        """Return the columns of each file, or the error that prevented reading it."""
        progress: queue.Queue[tuple[Path, int] | None] = queue.Queue()
        with tempfile.TemporaryDirectory(prefix="shardscope-trace-") as folder:
            futures = [
                self._threads.submit(
                    self._read_file, FileRequest(str(path), f"{folder}/{number}", write_caches), progress
                )
                for number, path in enumerate(paths)
            ]
            # This thread calls the user's function, whose exceptions and Ctrl-C end the load.
            for _ in paths:
                while (news := progress.get()) is not None:
                    note_bytes(*news)
            return [future.result() for future in futures]

    def _decode_chunk(self, text: bytes) -> Chunk:
        worker = self._idle.get()
        try:
            kind, data = _send_request(worker, CHUNK, text)
            if kind != CHUNK:
                raise _describe_end(worker)
            return unpack_chunk(memoryview(data))
        finally:
            self._idle.put(worker)

    def _read_file(
        self, request: FileRequest, progress: queue.Queue[tuple[Path, int] | None]
    ) -> RankColumns | ValueError:
        path = Path(request.path)
        worker = self._idle.get()
        try:
            kind, data = _send_request(worker, FILE, msgspec.json.encode(request))
            while kind == PROGRESS:
                progress.put((path, int.from_bytes(data, "little")))
                kind, data = receive_message(_get_pipe(worker.stdout))
            if kind == PROBLEM:
                return ValueError(data.decode(errors="replace"))
            rank = read_rank_file(Path(os.fsdecode(data)), path) if kind == FILE else None
            return rank or ValueError(f"Trace file {path} was not read: {_describe_end(worker)}")
        finally:
            self._idle.put(worker)
            progress.put(None)


def _send_request(worker: subprocess.Popen[bytes], kind: bytes, data: bytes) -> tuple[bytes, bytes]:
    try:
        send_message(_get_pipe(worker.stdin), kind, [data])
    except OSError:
        return b"", b""
    return receive_message(_get_pipe(worker.stdout))


def _get_pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def _describe_end(worker: subprocess.Popen[bytes]) -> ValueError:
    try:
        status: int | str = worker.wait(timeout=1)
    except subprocess.TimeoutExpired:
        status = "unknown"
    return ValueError(
        f"the process that read the trace ended with status {status} (-9: killed, as for lack of memory). "
        "Fix: load fewer ranks, or a recording of fewer steps."
    )


def _start_worker() -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": build_import_path()}
    return subprocess.Popen(
        build_module_command("shardscope.trace.loading.worker_process"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )
