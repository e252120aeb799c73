"""The export of the weights at the end of a run, repeated as long as the disk does not take it.

Without a checkpoint the trained weights are only in the memory of the ranks.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.core.number_format import format_count
from shardscope.machine.os_errors import DISK_FULL_ERRORS
from shardscope.records.folder import EXPORT, RunFolder
from shardscope.records.json_files import read_json, write_json_on_full_disk
from shardscope.training.checkpoints.folders import list_resumable

if TYPE_CHECKING:
    from shardscope.training.engine import TrainingContext

ENTRY = "export"
"""Entry of rank 0's engine report about the export."""
WAITS = "waits"
"""In rank 0's record: why the ranks wait to export, as a sentence; empty if they do not."""
WORSE = "worse"
"""Entry of a rank's engine report: how far the trained weights are worse than the initial ones."""
RETRY_SECONDS = 10.0
"""Time between two attempts."""
POLL_SECONDS = 1.0
"""Time between two looks for a stop."""
NUM_ATTEMPTS = 360
"""About an hour: a full disk is usually noticed by then, and the GPUs are paid for."""

_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ESTALE, errno.ETIMEDOUT)
"""Errors of a disk that may be cured, such as a server that is away or credentials that have expired."""


def export_when_possible(ctx: TrainingContext, complete: Callable[[Path], None]) -> None:
    """Export the weights into the run folder, all ranks together; ``complete`` adds files on rank 0.

    A write that the disk does not take is repeated for about an hour, until a stop is requested. Then raises
    ``RuntimeError`` with what is kept of the weights. Raises other errors at once.
    """
    # Weights that are written are not written again, for which the disk would need their size once more.
    left = [partial(ctx.engine.export, EXPORT), partial(_complete_together, ctx, complete)]
    began = time.monotonic()
    for attempt in range(NUM_ATTEMPTS):
        error = _try_to_export(left)
        if error is None:
            if attempt and ctx.rank == 0:
                _record_waiting(ctx.folder, "")
            return
        why, fix = f"the trained weights cannot be exported: {error.strerror}", _find_fix(error)
        if attempt == 0:
            print(f"{why}. The ranks keep them, and try again every {RETRY_SECONDS:.0f} s", flush=True)
        if ctx.rank == 0:
            waits = f"{why}. The ranks keep them and try again for an hour. Nearest fix: {fix}"
            _record_waiting(ctx.folder, waits)
        if _is_stopped_while_waiting(ctx):
            break
    waited = format_count(round((time.monotonic() - began) / 60), "minute")
    kept = _describe_kept(ctx, fix, is_written=len(left) == 1)
    raise RuntimeError(f"{why}, for {waited}. {kept}") from error


def _record_waiting(folder: Path, why: str) -> None:
    """Write why the ranks wait, for the supervisor, into a record so short that a full disk takes it."""
    path = RunFolder(folder).rank(0)
    with contextlib.suppress(OSError):
        write_json_on_full_disk(path, {**(read_json(path) or {}), WAITS: why})


def _complete_together(ctx: TrainingContext, complete: Callable[[Path], None]) -> None:
    from shardscope.training.checkpoints.temporary_folder import raising_on_all_ranks

    with raising_on_all_ranks():
        if ctx.rank == 0:
            complete(ctx.folder / EXPORT)


def _try_to_export(left: list[partial[None]]) -> OSError | None:
    """Do what is ``left`` of the export; return the disk's error, the same on all ranks; None at its end."""
    try:
        while left:
            left[0]()
            left.pop(0)
    except OSError as error:
        if error.errno not in (*DISK_FULL_ERRORS, *_UNWRITABLE):
            raise
        return error
    return None


def _find_fix(error: OSError) -> str:
    is_full = error.errno in DISK_FULL_ERRORS
    return "free some space on that disk" if is_full else "make the run folder writable again"


def _is_stopped_while_waiting(ctx: TrainingContext) -> bool:
    """Wait until the next attempt; return whether a stop was requested meanwhile, the same on all ranks."""
    for _ in range(round(RETRY_SECONDS / POLL_SECONDS)):
        stop_requested, _ = ctx.poll()
        if stop_requested:
            return True
        time.sleep(POLL_SECONDS)
    return False


def _describe_kept(ctx: TrainingContext, fix: str, *, is_written: bool) -> str:
    """Return what is kept of the weights that were not exported, and how to go on after ``fix``."""
    if is_written:
        return f"{EXPORT} has the weights, but not all of their other files, such as the tokenizer"
    done = ctx.engine.num_steps_done
    newest = next(reversed(list_resumable(ctx.folder)), None)
    fix = f"Nearest fix: {fix}, then launch again"
    if newest is None:
        return f"Nothing is kept of {format_count(done, 'step')}. {fix}"
    return f"{newest.relative_to(ctx.folder)} is kept. {fix} with resume={ctx.folder.name!r}"
