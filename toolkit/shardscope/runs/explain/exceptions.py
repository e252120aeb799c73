"""JSON records of exceptions, robust against 1 MB messages, a failing ``str()`` and exhausted memory."""

from __future__ import annotations

import errno
import os
import time
import traceback
from typing import TypedDict

from shardscope.runs.explain.failure import looks_like_peer_lost

MAX_TEXT = 64 * 1024
MAX_SUMMARY = 300
WORKER_TRACEBACK = "Original Traceback (most recent call last):\n"
"""Part of the message of an exception that torch raises again in another process (torch/_utils.py)."""
NO_SHARED_MEMORY = "unable to allocate shared memory(shm) for file"
"""Part of torch's error for a full /dev/shm (aten/src/ATen/MapAllocator.cpp)."""
SHARED_MEMORY_FIX = "make /dev/shm writable, with more space: a container's has 64 MB without --shm-size"
FULL_DISK_FIX = "free some space on that disk"
RUST_FULL_DISK = f"(os error {errno.ENOSPC})"
"""Part of the errors of libraries in Rust, such as safetensors, which raise no OSError on a full disk."""
SHARED_MEMORY_FILES = ("multiprocessing/synchronize.py", "multiprocessing/shared_memory.py")
_SHARED_MEMORY_ERRORS = frozenset({errno.ENOSPC, errno.EROFS, errno.EACCES, errno.ENOSYS})
"""Of a /dev/shm that is full, mounted read-only, not this user's, or missing."""


class ExceptionRecord(TypedDict):
    """The error record of one process, written to its run folder."""

    time: float
    """Epoch seconds."""
    monotonic: float
    """Seconds of this machine's monotonic clock, by which failures are ordered."""
    type: str
    summary: str
    """One line, as in "raised ValueError: ..."."""
    traceback: str
    peer_lost: bool
    """Whether the exception only reports that another rank is gone."""


def make_exception_record(error: BaseException, *, can_resume: bool = False) -> ExceptionRecord:
    """Return time, type, one-line summary and bounded traceback of ``error``. Never raises.

    The time is recorded twice: in epoch seconds for display, and by the monotonic clock for ordering.
    ``can_resume``: the task has the field ``resume``, which the fix of a full disk then names.
    """
    # The times first: formatting a long traceback takes time, and failures are ordered by them.
    now, monotonic = time.time(), time.monotonic()
    name = type(error).__name__
    # The user's exception classes run here: their ``__str__`` may raise anything.
    try:
        text = shorten("".join(traceback.format_exception(error)))
    except BaseException as second:
        text = f"{name} (its traceback could not be written: {type(second).__name__})"
    try:
        message = str(error).strip()
    except BaseException as second:
        message = f"(its text could not be read: {type(second).__name__})"
    first_line = message.splitlines()[0] if message else ""
    if WORKER_TRACEBACK in message:  # The first line only says that a worker of a DataLoader failed.
        first_line = f"{first_line.rstrip('.')}: {message.splitlines()[-1].strip()}"
    # One line, with the position in the user's script rather than the end of a long message.
    summary = f"raised {name}: {first_line}" if first_line else f"raised {name}"
    if notes := getattr(error, "__notes__", ()):  # The position in the user's script.
        summary = f"{summary[: MAX_SUMMARY // 2]} ({notes[0]})"
    fix = _find_disk_fix(error, can_resume=can_resume) if isinstance(error, OSError) else ""
    fix = fix or FULL_DISK_FIX * (RUST_FULL_DISK in message)
    if fix := fix or SHARED_MEMORY_FIX * (NO_SHARED_MEMORY in message):
        summary = f"{summary}. Nearest fix: {fix}"
    if isinstance(error, SystemExit):
        summary = f"called sys.exit({first_line})"
    return {
        "time": now,
        "monotonic": monotonic,
        "type": name,
        "summary": _cut_middle(summary),
        "traceback": text,
        "peer_lost": looks_like_peer_lost(name, text),
    }


def _find_disk_fix(error: OSError, *, can_resume: bool) -> str:
    """Return the fix for a full disk; empty if ``error`` is another one."""
    if error.filename is None and error.errno in _SHARED_MEMORY_ERRORS and _is_of_shared_memory(error):
        # The error names no file, and the disks of the run have space.
        return SHARED_MEMORY_FIX
    if error.errno != errno.ENOSPC:
        return ""
    if error.filename is None:
        # ENOSPC is also the error of a limit, such as that of inotify's watches; libraries then say so.
        return FULL_DISK_FIX if error.strerror == os.strerror(errno.ENOSPC) else ""
    again = " with resume= for the last checkpoint" if can_resume else ""
    return f"free some space there, then launch again{again}"


def _is_of_shared_memory(error: OSError) -> bool:
    """Return whether a lock or a shared block of ``multiprocessing``, which are in /dev/shm, raised it."""
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    return bool(frames) and frames[-1].filename.endswith(SHARED_MEMORY_FILES)


def _cut_middle(summary: str) -> str:
    """Return a summary without its middle if it is too long: our errors end with the nearest fix."""
    if len(summary) <= MAX_SUMMARY:
        return summary
    head, tail = summary[: MAX_SUMMARY // 2].rstrip(), summary[-(MAX_SUMMARY // 2 - 5) :].lstrip()
    return f"{head} ... {tail}"


def shorten(text: str) -> str:
    """Return ``text`` without its middle if it is longer than 64 KiB: both ends of a traceback matter."""
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]}\n... {len(text) - 2 * half:,} characters left out ...\n{text[-half:]}"
