"""Failures of a run, root causes first.

When one rank dies, the others see closed connections a moment later, and torch elastic often reports one of
those. So every rank writes its own exception first and the launcher writes how each process ended. This
module orders them: errors that look like a lost peer come last, the rest by time.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from shardscope.records.clock_offsets import NO_OFFSETS, ClockOffsets, read_clock_offsets
from shardscope.records.folder import NodeFolder, RunFolder
from shardscope.records.json_files import read_json, read_lines, read_tail_text
from shardscope.records.json_values import is_int, is_number

PEER_LOST_TEXTS = (
    "connection closed by peer",
    "connection was likely closed",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "remote process exited",
    "ncclremoteerror",
    "ncclsystemerror",
    "socket timeout",
    "timed out waiting",
    "watchdog caught collective operation timeout",
    "communicator was aborted",
    "gloo/transport",
)
"""Parts of error messages (in lower case) of gloo, NCCL and TCPStore for a peer that is gone."""

SIGHUP, SIGABRT, SIGBUS, SIGKILL, SIGSEGV, SIGTERM = 1, 6, 7, 9, 11, 15
"""Linux's numbers, whose ranks end so. Other systems, which read the run, lack some or have other numbers."""

SIGNAL_WORDS = {
    SIGKILL: "was killed by SIGKILL",
    SIGSEGV: "crashed with SIGSEGV (segmentation fault); the end of its log shows where",
    SIGBUS: "crashed with SIGBUS, most likely because /dev/shm is full",
    SIGABRT: "aborted with SIGABRT; the end of its log says why",
}

MAX_RETURNED_RANKS = 4
"""Number of ranks that the explanation of a lost peer names."""
LOG_CHARACTERS = 4096
"""Number of last characters of a log that an error quotes."""
CRASH_BYTES = 2**16
"""End of a log in which the message of a crash is searched: stacks of all threads may follow it."""
FATAL_ERROR = "Fatal Python error: "
"""Start of the fault handler's output (CPython, Modules/faulthandler.c), before the stacks."""

EXIT = "process_exit"
"""Entry of a rank's own record: its line of ``exits.jsonl``, for which the disk had no space."""

TRACEBACK_FRAME = re.compile(r'^  File ".*", line \d+, in .*$', re.MULTILINE)
"""A frame of an exception's traceback; faulthandler's frames have no comma before "in"."""
RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
"""Prefix that torch.distributed's excepthook adds to each line."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Failure of one rank, or of the launcher (rank None)."""

    rank: int | None
    time: float
    """Seconds of this machine's monotonic clock, which is the same in all processes and never set back; of a
    run on several nodes, seconds since the epoch by the clock of node 0."""
    reason: str
    """Reason, one line."""
    text: str
    """The traceback, or the end of the rank's log if it left none."""
    raised: str
    """The exception that ended it, as far as known; empty if none did."""
    is_consequence: bool
    """Whether it looks like a consequence of another rank's failure."""
    is_unexplained: bool = False
    """Whether its exit code is unknown: torch elastic, which ends the other ranks, reaped it first."""
    where: str = ""
    """The rank's node, in a run on several nodes, to follow its name: `` on node 1 (gpu-07)``."""


def find_first_failure(folder: RunFolder, world_size: int) -> Failure | None:
    """Return the earliest failure that is not a consequence of another; None if nothing failed."""
    return next(iter(find_failures(folder, world_size)), None)


def find_failures(folder: RunFolder, world_size: int) -> list[Failure]:
    """Return all failures by time, those that look like a consequence of another last."""
    # A rank's own exception says more than its exit code, which is the fallback.
    offsets = read_clock_offsets(folder)
    failures = [_read_exception(folder, rank, offsets) for rank in range(world_size)]
    raised = {failure.rank for failure in failures if failure is not None}
    # A rank that was killed, or crashed in a native library, wrote no exception.
    exits = _read_exits(folder, offsets, world_size)
    for record in exits:
        if record.rank not in raised:
            failures.append(_read_death(folder, record))
    failures += [_read_launcher_failure(part, offsets) for part in _list_parts(folder)]
    known = [failure for failure in failures if failure is not None]
    located = _add_nodes(folder, world_size, known)
    ordered = sorted(located, key=lambda failure: (failure.is_consequence, failure.time))
    if not folder.has_nodes:
        ordered = _find_terminated_rank(ordered, exits)
    return _explain_returned_peers(folder, world_size, ordered)


def _find_terminated_rank(failures: list[Failure], exits: Sequence[_RankExit]) -> list[Failure]:
    """Return ``failures``; if all are consequences, first the rank that SIGTERM ended before any other ended.

    torch elastic sends SIGTERM only after a rank has ended, so that this one came from elsewhere.
    """
    first_exit = min(exits, key=lambda record: record.time, default=None)
    if first_exit is None or first_exit.code != -SIGTERM or first_exit.was_ended:
        return failures
    terminated = next((each for each in failures if each.rank == first_exit.rank and not each.raised), None)
    if terminated is None or not all(failure.is_consequence for failure in failures):
        return failures
    why = "another process sent it (kill, or a guard of the host's memory such as earlyoom)"
    cause = replace(terminated, reason=f"{terminated.reason}: {why}", is_consequence=False)
    return [cause, *(failure for failure in failures if failure is not terminated)]


def _explain_returned_peers(folder: RunFolder, world_size: int, failures: Sequence[Failure]) -> list[Failure]:
    """Return ``failures``; one that lost a peer without a failed one names the ranks that have returned.

    Ranks with fewer batches than others return first, which is not a failure, and close their connections.
    """
    first = failures[0] if failures else None
    if first is None or not first.is_consequence or not first.raised:
        return list(failures)
    markers = [read_json(folder.rank(rank)) or {} for rank in range(world_size)]
    returned = [rank for rank, marker in enumerate(markers) if marker.get("exit") == "finished"]
    if not returned:
        return list(failures)
    named = ", ".join(map(str, returned[:MAX_RETURNED_RANKS]))
    more = " and more" * (len(returned) > MAX_RETURNED_RANKS)
    why = (
        f"rank{'s' * (len(returned) > 1)} {named}{more} had returned from the task, while every rank has to "
        "call each collective: all need the same number of steps"
    )
    explained = replace(
        first, reason=f"{first.reason}; {why}", text=f"{first.text.rstrip()}\n\n{why[0].upper()}{why[1:]}."
    )
    return [explained, *failures[1:]]


def _add_nodes(folder: RunFolder, world_size: int, failures: Sequence[Failure]) -> list[Failure]:
    """Return ``failures`` whose reasons name the rank's node too; unchanged in a run on one machine."""
    num_nodes = (read_json(folder.run_json) or {}).get("num_nodes") if folder.has_nodes else 1
    if not is_int(num_nodes) or not 1 < num_nodes <= world_size:
        return list(failures)
    located = []
    for failure in failures:
        if failure.rank is None:
            located.append(failure)
            continue
        node = failure.rank // (world_size // num_nodes)
        where = f" on {NodeFolder(folder.path, node, num_nodes, folder.attempt).title}"
        name = f"rank {failure.rank}"
        reason, text = (
            f"{name}{where}{line.removeprefix(name)}" if line.startswith(name) else line
            for line in (failure.reason, failure.text)
        )
        located.append(replace(failure, reason=reason, text=text, where=where))
    return located


def describe_exit(code: int | None, *, on_full_disk: bool = False) -> str:
    """Describe an exit code (None: unknown) as a phrase to follow a name, as in "rank 1 ...".

    ``on_full_disk``: the process may have been unable to write its last records, such as "finished".
    """
    if on_full_disk and (code is None or code >= 0):
        how = "ended" if code is None else f"exited with code {code}"
        return f"{how}, and the disk of the run folder is full, so its last records are lost"
    if code is None:
        return "ended before its task returned; its exit code is not known"
    if code >= 0:
        return f"exited with code {code} before its task returned (os._exit or a native library)"
    if -code in SIGNAL_WORDS:
        return SIGNAL_WORDS[-code]
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def describe_late_exit(code: int | None) -> str:
    """Describe the exit code of a process whose task had already returned."""
    if code is None or code < 0:
        return (
            f"{describe_exit(code)}, after its task had returned" if code else "ended after its task returned"
        )
    return f"exited with code {code} after its task had returned"


def has_rank_died(folder: RunFolder) -> bool:
    """Return whether any rank process ended without returning from its task."""
    return any(_read_death(folder, record) is not None for record in _read_exits(folder, NO_OFFSETS))


def looks_like_peer_lost(name: str, text: str) -> bool:
    """Return whether an exception only reports that another rank is gone, or has failed."""
    if name == "OtherRankError":  # training/checkpoints/temporary_folder.py
        return True
    lower = text[-8192:].lower()
    # If the task itself waits for an async operation, no torch frame is in the traceback, but gloo's message
    # names its own source file.
    is_distributed = (
        name in ("DistBackendError", "DistNetworkError", "DistStoreError")
        or "torch/distributed" in lower
        or "gloo/transport" in lower
    )
    # The same texts occur in errors of other origins, such as a broken pipe to a child process.
    return (is_distributed or "Connection" in name) and any(part in lower for part in PEER_LOST_TEXTS)


def find_last_raised(log: str, code: int | None) -> str:
    """Return the error that ended a process without a record, read from the end of its log; "" if unknown.

    Only the last one counts: errors before it were handled.
    """
    if code == -SIGABRT:  # std::terminate prints the exception's type and message in two lines.
        _, marker, message = log.rpartition("terminate called after throwing an instance of ")
        return " ".join(line.strip() for line in message.splitlines()[:2]) if marker else ""
    # Another signal: whatever exception the log contains, it was handled.
    if code is not None and code < 0:
        return ""
    # The first line after the last frame that is not indented, as in "ValueError: ...".
    _, *after = TRACEBACK_FRAME.split(RANK_PREFIX.sub("", log))
    lines = after[-1].splitlines() if after else []
    return next((line for line in lines if line and not line.startswith(" ")), "")


def _read_log_end(path: Path, *, is_crash: bool) -> str:
    """Return the end of a rank's log; after a crash, from the message of Python's fault handler on."""
    log = read_tail_text(path, CRASH_BYTES)
    crash = log.rfind(FATAL_ERROR) if is_crash else -1
    if crash < 0:
        return log[-LOG_CHARACTERS:]
    # The frame that crashed is the first one; the last lines are frames of the launcher and names of modules.
    start = log.rfind("\n", 0, max(0, crash - LOG_CHARACTERS // 4)) + 1
    end = crash + LOG_CHARACTERS
    return log[start:end] + ("\n..." if end < len(log) else "")


def quote_log_end(folder: RunFolder, path: Path, *, is_crash: bool) -> str:
    """Return the end of the log ``path`` of a process, with its name in the run folder."""
    log, name = _read_log_end(path, is_crash=is_crash), f"{path.relative_to(folder.path)} in the run folder"
    return f"The end of its log, {name}:\n{log}" if log.strip() else f"Its log, {name}, is empty."


def _list_parts(folder: RunFolder) -> Sequence[RunFolder]:
    """Return the folders of the run's nodes, or this folder: those with files of a launcher."""
    return folder.list_nodes() or [folder]


def _read_time(folder: RunFolder, record: Mapping[str, object], seconds_ahead: float) -> float:
    # Nodes have different monotonic clocks.
    known = (record.get(name) for name in (("time",) if folder.has_nodes else ("monotonic", "time")))
    return next((float(value) - seconds_ahead for value in known if is_number(value)), 0.0)


def _read_exception(folder: RunFolder, rank: int, offsets: ClockOffsets) -> Failure | None:
    record = read_json(folder.error(rank))
    if record is None:
        # On a full disk there is only what fitted into the rank's own record.
        record = read_json(folder.rank(rank)) or {}
        if not isinstance(record.get("summary"), str):
            return None
        record = {"time": record.get("ended"), "traceback": record["summary"], **record}
    return Failure(
        rank=rank,
        time=_read_time(folder, record, offsets.of_rank(rank)),
        reason=f"rank {rank} {record.get('summary', 'failed')}",
        text=str(record.get("traceback", "")),
        raised=str(record.get("traceback", "")),
        is_consequence=bool(record.get("peer_lost")),
    )


class _RankExit(NamedTuple):
    """End of a rank process, as its parent recorded it."""

    rank: int
    code: int | None
    time: float
    """On the clock of ``Failure.time``."""
    was_ended: bool
    """Whether its supervisor has killed it, for another rank's failure or a stop."""


def _read_exits(folder: RunFolder, offsets: ClockOffsets, world_size: int = 0) -> list[_RankExit]:
    """Return one record per ended rank: the time of its first record and the first known exit code.

    ``world_size``: number of ranks whose own records are read too, for those that ``exits.jsonl`` lacks.
    """
    exits: dict[int, _RankExit] = {}
    lines = [line for part in _list_parts(folder) for line in read_lines(part.exits)]
    without_space = ((read_json(folder.rank(rank)) or {}).get(EXIT) for rank in range(world_size))
    for record in (*lines, *(entry for entry in without_space if isinstance(entry, dict))):
        rank, code = record.get("rank"), record.get("code")
        if is_int(rank) and (code is None or is_int(code)):
            ended = _read_time(folder, record, offsets.of_rank(rank))
            was_ended = record.get("was_ended") is True
            first = exits.setdefault(rank, _RankExit(rank, code, ended, was_ended))
            if first.code is None:
                exits[rank] = first._replace(code=code)
    return list(exits.values())


def _read_death(folder: RunFolder, record: _RankExit) -> Failure | None:
    rank, code = record.rank, record.code
    # No failure: the task returned and the process ended normally, or torch elastic reaped it unseen.
    marker = read_json(folder.rank(rank)) or {}
    if code in (0, None) and marker.get("exit") == "finished":
        return None
    if marker.get("exit") == "finished":
        how = describe_late_exit(code)
    else:
        how = describe_exit(code, on_full_disk=folder.is_on_full_disk)
    reason = f"rank {rank} {how}"
    is_crash = code is not None and code < 0
    return Failure(
        rank=rank,
        time=record.time,
        reason=reason,
        text=f"{reason}.\n{quote_log_end(folder, folder.log(rank), is_crash=is_crash)}",
        raised=find_last_raised(_read_log_end(folder.log(rank), is_crash=is_crash), code),
        # torch elastic ends the other ranks with SIGTERM, a supervisor on a scheduler's node with SIGHUP.
        is_consequence=code in (-SIGTERM, -SIGHUP) or record.was_ended,
        is_unexplained=code is None,
    )


def _read_launcher_failure(folder: RunFolder, offsets: ClockOffsets) -> Failure | None:
    record = read_json(folder.launcher_error)
    if record is None:
        return None
    seconds_ahead = offsets.of_node(folder.node) if isinstance(folder, NodeFolder) else 0.0
    return Failure(
        rank=None,
        time=_read_time(folder, record, seconds_ahead),
        reason=f"the launcher {record.get('summary', 'failed')}",
        text=str(record.get("traceback", "")),
        raised=str(record.get("traceback", "")),
        is_consequence=False,
    )
