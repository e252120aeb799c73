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
    # One line, with the position in the user's script rather than the end of a long message.
    summary = f"raised {name}: {first_line}" if first_line else f"raised {name}"
    if notes := getattr(error, "__notes__", ()):  # The position in the user's script.
        summary = f"{summary[: MAX_SUMMARY // 2]} ({notes[0]})"
    if isinstance(error, OSError) and (fix := _find_disk_fix(error, can_resume=can_resume)):
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
    if error.errno != errno.ENOSPC:
        return ""
    if error.filename is None:
        # ENOSPC is also the error of a limit, such as that of inotify's watches; libraries then say so.
        return "free some space on that disk" if error.strerror == os.strerror(errno.ENOSPC) else ""
    again = " with resume= for the last checkpoint" if can_resume else ""
    return f"free some space there, then launch again{again}"


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
