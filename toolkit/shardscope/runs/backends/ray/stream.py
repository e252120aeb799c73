"""A Ray run without a shared run folder: each node and the coordinator have a copy, kept equal by its actors.

A node's processes write their node's copy. The coordinator exchanges news with each node: it takes what the
node has written, and sends commands and what the other nodes have written. The puller (``puller.py``) on
the kernel's machine takes all of it from the coordinator, and brings commands. Nobody pushes, so nothing
queues up.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.machine.processes import is_alive
from shardscope.records.folder import NODES, RAY, NodeFolder, RunFolder
from shardscope.records.json_files import append_line, read_json, write_json
from shardscope.records.redaction import OVERLAP_BYTES, LogCleaner, read_masked_size
from shardscope.records.regular_files import size_of
from shardscope.runs.backends.folder_stream import (
    MAX_BYTES,
    Chunk,
    FolderCopy,
    FolderSource,
    State,
    advance,
    scan,
    stays,
)
from shardscope.training.checkpoints.folders import POSITION_FILE

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from shardscope.runs.backends.ray.node import NodeActor

FROM_KERNEL = frozenset({
    *("run.json", "job.json", "task.pkl", "control.jsonl", "job_end.json", "summary.json", "note.json"),
    "kernel_watch.log",
})  # fmt: skip
"""Files of the run folder that only the kernel's machine writes."""
PAUSE_SECONDS = 0.5
BEGIN_SECONDS = 150.0
EXCHANGE_SECONDS = 60.0
"""Time for one answer of a node, after which the next attempt asks for the same bytes."""
FIRST_PULL_SECONDS = 600.0
DRAIN_SECONDS = 300.0
"""Time for what a node has written last, traces say, after its processes have ended."""
WANTED = ("nodes/", "ray/", "ranks/", "errors/")
"""What the supervisor of a node reads of the others."""
NOT_WANTED = ("traces/", "recordings/", "memory_snapshots/", "tensorboard/")
"""What node 0 does not need of the others; it writes the run's end from all the rest."""

MASKED_LOGS = re.compile(r"logs/rank-\d+\.log|nodes/\d+/(supervisor|logs/launcher)\.log")
"""Logs in which the supervisor masks secrets after they were written."""


def create_copy(name: str, parent: str | None) -> Path:
    """Create an empty run folder, mode 0700, in ``parent`` (None: a temporary one). Raises ``OSError``."""
    if parent is not None:
        Path(parent).mkdir(mode=0o700, parents=True, exist_ok=True)
    # The run keeps its name; the folder above has a name that nobody can know before.
    folder = RunFolder(Path(tempfile.mkdtemp(prefix="shardscope-", dir=parent)) / name)
    folder.create()
    for part in (NODES, RAY):
        (folder.path / part).mkdir(mode=0o700)
    return folder.path


def delete_copy(path: Path) -> None:
    """Delete a folder of :func:`create_copy`."""
    shutil.rmtree(path.parent, ignore_errors=True)


class NodeStream:
    """The copy of one node, in its actor."""

    def __init__(self, node: int, name: str, parent: str | None) -> None:
        """Create the copy. Raises ``OSError``."""
        self.path = create_copy(name, parent)
        self._node = node
        self._foreign: set[str] = set()
        """Files that came from other nodes."""
        self._copy = FolderCopy(self.path)
        self._source = FolderSource(self.path, self._is_sent, self._count_masked_bytes)
        self._own = NodeFolder(self.path, node, attempt=1)  # A streamed run has no other.
        self._is_behind = False
        """Whether a rank's log has bytes that must not be sent yet."""
        self._kept: dict[str, object] = {}

    def begin(self, chunks: list[Chunk]) -> None:
        """Write the files with which the run starts. Raises ``OSError``."""
        self._copy.write(chunks)

    def exchange(
        self, received: Mapping[str, State], chunks: list[Chunk]
    ) -> tuple[list[Chunk], dict[str, int]]:
        """Write what is new on other nodes. Return what the coordinator lacks, and what was not written.

        The latter are files, and the offsets from which a full disk has no room for them: the records of this
        node must arrive all the same.
        """
        self._foreign |= {chunk.name for chunk in chunks}
        refused: dict[str, int] = {}
        for chunk in chunks:
            if chunk.name not in refused:
                try:
                    self._copy.write([chunk])
                except OSError:
                    refused[chunk.name] = chunk.offset
        self._record_kept()
        self._is_behind = False
        return self._source.read(received), refused

    def close(self) -> None:
        """Delete the copy, unless it has files that stay on this node."""
        if not self._kept:
            delete_copy(self.path)

    def _is_sent(self, name: str) -> bool:
        """Return whether a file is sent; what says that the ranks have ended follows their logs."""
        if name in FROM_KERNEL or name in self._foreign:
            return False
        # Node 0 waits for the ends of the others, and writes the run's. Its own end is not to wait: another
        # node may end by it.
        last = self._own.status if self._own.is_lead else self._own.ended
        return not (self._is_behind and self.path / name == last and self._own.ended.exists())

    def _count_masked_bytes(self, name: str, size: int) -> int:
        """Return how many bytes of a file may be sent: of a log, those in which secrets are masked.

        The supervisor masks them, and so does this process before it has begun and after it has ended.
        """
        if MASKED_LOGS.fullmatch(name) is None:
            return size
        log = self.path / name
        masked = read_masked_size(log)
        if masked < size and not self._is_supervised():
            cleaner = LogCleaner(log, offset=max(0, masked - OVERLAP_BYTES))
            try:
                next(cleaner.finish())
            except OSError:  # The run's end is not to wait for a log that cannot be masked.
                return min(masked, size)
            masked = max(masked, cleaner.offset)
        # The supervisor's own log has lines after the end of the run.
        self._is_behind |= masked < size and log != self._own.supervisor_log
        return min(masked, size)

    def _is_supervised(self) -> bool:
        """Return whether the supervisor of this node's ranks runs."""
        record = read_json(self._own.supervisor) or {}
        pid, started = record.get("pid"), record.get("started")
        try:
            return isinstance(pid, int) and isinstance(started, int | float) and is_alive(pid, started)
        except OSError:  # It cannot be read now.
            return True

    def _record_kept(self) -> None:
        """Record which files stay on this node, and the steps of its checkpoints."""
        own = self.path / NODES / str(self._node)
        sizes: dict[str, int] = {}
        checkpoints: dict[str, object] = {}
        for name, (size, _, _) in scan(self.path):
            if stays(name, size):
                # One entry for each checkpoint or model: their many files belong together.
                parts = name.split("/")
                top = "/".join(parts[:2]) if parts[0] == "checkpoints" else parts[0]
                sizes[top] = sizes.get(top, 0) + size
                if parts[-1] == POSITION_FILE:
                    position = read_json(self.path / name) or {}
                    checkpoints[top] = position.get("num_steps_done")
        kept: dict[str, object] = {"files": sizes, "steps": checkpoints} if sizes else {}
        if kept != self._kept and own.is_dir():
            host = socket.gethostname()
            record = {"host": host, "folder": str(self.path), **kept}
            with contextlib.suppress(OSError):
                write_json(own / "kept.json", record, as_is=("host", "folder"))
                self._kept = kept


class StreamHub:
    """The coordinator's copy of a run folder, synchronized with those of the nodes and of the notebook."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._copy = FolderCopy(path)
        self._nodes: dict[int, ActorHandle[NodeActor]] = {}
        self._owners: dict[str, int] = {"status.jsonl": 0}
        self._sent: dict[int, dict[str, State]] = {}
        """What each node has of the other nodes."""
        self._received: dict[int, dict[str, State]] = {}
        """What is here of each node."""
        self._locks: dict[int, threading.Lock] = {}
        self._began = time.monotonic()
        self._is_pulled = False
        """Whether a puller has ever asked."""
        self.is_released = False
        """Whether nobody needs this copy after the run: the puller has everything, or there is none."""

    # For the puller and the launch.

    def receive(self, chunks: list[Chunk]) -> None:
        """Write files of the launch. Raises ``OSError``."""
        self._copy.write(chunks)

    def pull(self, received: Mapping[str, State], commands: Chunk | None) -> tuple[list[Chunk], int]:
        """Write the puller's commands; return what it lacks, and the size of the commands here."""
        self._is_pulled, self.is_released = True, False
        # Those of a puller that was killed may arrive after they were sent again.
        if commands is not None and commands.offset == self._count_command_bytes():
            self._copy.write([commands])
        source = FolderSource(self.path, lambda file: file not in FROM_KERNEL)
        return source.read(received), self._count_command_bytes()

    def stop_if_abandoned(self) -> None:
        """Request a stop if no puller has ever come: the launch has failed. Raises ``OSError``."""
        if not self._is_pulled and time.monotonic() - self._began > FIRST_PULL_SECONDS:
            self._is_pulled = self.is_released = True
            append_line(RunFolder(self.path).control, {"command": "stop", "time": time.time()})

    def _count_command_bytes(self) -> int:
        return size_of(RunFolder(self.path).control)

    # For the nodes.

    def begin(self, node: int, actor: ActorHandle[NodeActor], name: str, parent: str | None) -> str:
        """Give a node its copy with the files of the launch. Return its path. Raises Ray's errors."""
        import ray

        path: str = ray.get(actor.prepare.remote(node, name, parent), timeout=BEGIN_SECONDS)
        sent = self._sent[node] = {}
        files = {"status.jsonl"} if node == 0 else set()
        # task.pkl may be large, so this takes several rounds.
        source = FolderSource(self.path, lambda file: file in FROM_KERNEL | files)
        while chunks := source.read(sent):
            ray.get(actor.begin.remote(chunks), timeout=BEGIN_SECONDS)
            advance(sent, chunks)
        self._received[node] = {name: sent[name] for name in files if name in sent}
        self._nodes[node], self._locks[node] = actor, threading.Lock()
        # A thread for each node: one that does not answer must not delay the heartbeats of the others.
        threading.Thread(target=self._keep_exchanging, args=(node,), daemon=True).start()
        return path

    def _exchange(self, node: int) -> int:
        """Exchange news with a node. Return their bytes, -1 without any. Raises Ray's errors, ``OSError``."""
        import ray

        with self._locks[node]:
            actor, sent, received = self._nodes[node], self._sent[node], self._received[node]
            chunks = FolderSource(self.path, lambda file: self._is_for(node, file)).read(sent)
            answer = actor.exchange.remote(received, chunks)
            news: list[Chunk]
            news, refused = ray.get(answer, timeout=EXCHANGE_SECONDS)
            chunks = [chunk for chunk in chunks if chunk.offset < refused.get(chunk.name, chunk.offset + 1)]
            advance(sent, chunks)
            for chunk in news:
                self._owners.setdefault(chunk.name, node)
            # Files that several nodes have written under one name are those of the first.
            self._copy.write([chunk for chunk in news if self._owners[chunk.name] == node])
            advance(received, news)
        exchanged = [*news, *chunks]
        return sum(len(chunk.data) for chunk in exchanged) if exchanged else -1

    def drain(self, node: int) -> None:
        """Take all that a node has written, after its processes have ended; then let it delete its copy."""
        from ray.exceptions import ActorUnavailableError, RayActorError

        if node not in self._nodes:
            return
        deadline = time.monotonic() + DRAIN_SECONDS
        is_gone = is_complete = False
        while not (is_gone or is_complete) and time.monotonic() < deadline:
            try:
                is_complete = self._exchange(node) < 0
            except Exception as error:
                # What an actor that is gone has sent before is here. After all else (a broken connection, a
                # busy node, a full disk) the next exchange takes the same bytes.
                is_gone = isinstance(error, RayActorError) and not isinstance(error, ActorUnavailableError)
                time.sleep(0.0 if is_gone else PAUSE_SECONDS)
        actor = self._nodes.pop(node)
        if not is_gone:
            actor.close.remote()

    def _keep_exchanging(self, node: int) -> None:
        while node in self._nodes:
            size = 0
            with contextlib.suppress(Exception):  # The coordinator notices a lost node by itself.
                size = self._exchange(node)
            if size < MAX_BYTES:
                time.sleep(PAUSE_SECONDS)

    def _is_for(self, node: int, name: str) -> bool:
        if name == "control.jsonl":
            return True
        if name in FROM_KERNEL or self._owners.get(name) == node:
            return False
        return not name.startswith(NOT_WANTED) if node == 0 else name.startswith(WANTED)


def read_kept(folder: RunFolder) -> list[dict[str, object]]:
    """Return what stays on the nodes of a run: a record for each node that has such files."""
    kept = ((node.node, read_json(node.own / "kept.json")) for node in folder.list_nodes())
    return [{"node": number, **record} for number, record in kept if record is not None]
