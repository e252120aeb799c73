"""Requests for the ranks' Python stacks and their replies, used by the hang detection."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

from shardscope.machine.processes import read_start_time, signal_process
from shardscope.records.folder import RunFolder
from shardscope.records.json_files import read_json, read_tail_text
from shardscope.records.regular_files import open_to_append, size_of
from shardscope.runs.watch.stacks import MAX_BYTES, STACK_SIGNAL, read_process_state

REPLY_SECONDS = 1.0
"""Time that ranks get to write their stacks."""
NO_REPLY = "it did not answer\n"
NO_SPACE = "its stack could not be written, because the disk is full\n"
NO_STACKS = (NO_REPLY, NO_SPACE)
"""Replies of a rank whose stack is not known."""
MAX_NAMED_RANKS = 4
STOPPED = "is stopped by SIGSTOP or a debugger"


class StackRequests:
    """Stack requests of one run: call ``send``, and ``read_replies`` after ``REPLY_SECONDS``."""

    def __init__(self, folder: RunFolder, world_size: int) -> None:
        self.folder = folder
        self.ranks = folder.select_ranks(world_size)
        self.marks: dict[int, int] = {}
        """Size of each rank's stack file at the last request, in bytes."""

    def send(self) -> None:
        """Request the stacks of every rank that can answer."""
        for rank in self.ranks:
            pid, path = self.find_live_pid(rank), self.folder.stacks(rank)
            # Without its handler the signal would kill the rank; the file exists once it is installed.
            if pid is not None and path.exists():
                self.marks[rank] = path.stat().st_size
                signal_process(pid, STACK_SIGNAL)

    def read_replies(self) -> dict[int, str]:
        """Return each rank's reply to the last request, or the reason why it cannot answer."""
        return {rank: self._read_reply(rank) for rank in self.ranks}

    def list_returned(self) -> list[int]:
        """Return the ranks whose task has returned. Their processes live until the last rank has ended."""
        records = {rank: read_json(self.folder.rank(rank)) or {} for rank in self.ranks}
        return [rank for rank, record in records.items() if record.get("exit") == "finished"]

    def find_live_pid(self, rank: int) -> int | None:
        """Return the process id of ``rank``; None if it is gone or has not written its record."""
        marker = read_json(self.folder.rank(rank)) or {}
        pid = marker.get("pid")
        try:
            return pid if isinstance(pid, int) and read_start_time(pid) == marker.get("started") else None
        except OSError:  # Temporary: the next check tries again.
            return None

    def write_into_logs(self, message: str, replies: Mapping[int, str]) -> None:
        """Append ``message`` and the rank's stacks to each rank's log."""
        for rank, reply in replies.items():
            with contextlib.suppress(OSError):  # A full disk must not prevent the status change.
                self._append_to_log(rank, f"\nshardscope: {message}; where rank {rank} stands:\n{reply}")

    def _append_to_log(self, rank: int, text: str) -> None:
        with open_to_append(self.folder.log(rank)) as file:
            os.write(file.fileno(), text.encode(errors="replace"))

    def _read_reply(self, rank: int) -> str:
        path = self.folder.stacks(rank)
        num_bytes = size_of(path) - self.marks.get(rank, 0)
        if num_bytes > 0:
            return read_tail_text(path, min(num_bytes, MAX_BYTES))
        pid = (read_json(self.folder.rank(rank)) or {}).get("pid")
        if isinstance(pid, int) and read_process_state(pid) in ("T", "t"):
            return f"process {pid} {STOPPED}, without a stack: kill -CONT {pid}\n"
        return NO_SPACE if self.folder.is_on_full_disk else NO_REPLY


def is_stopped(reply: str) -> bool:
    """Return whether a reply says that its rank is stopped; a stack begins with the name of a thread."""
    return reply.startswith("process ") and STOPPED in reply
