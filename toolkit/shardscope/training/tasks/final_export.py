"""The last writes of a run, of its export or checkpoint, repeated as long as the disk does not take them.

Without a checkpoint the trained weights are only in the memory of the ranks.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.core.number_format import format_count
from shardscope.machine.os_errors import find_disk_fix, is_disk_error
from shardscope.records.folder import EXPORT, RunFolder
from shardscope.records.json_files import read_json, write_json_on_full_disk
from shardscope.training.checkpoints.folders import BEST, CHECKPOINTS, list_resumable

if TYPE_CHECKING:
    from shardscope.training.engine import TrainingContext

ENTRY = "export"
"""Entry of rank 0's engine report about the export."""
WAITS = "waits"
"""In rank 0's record: why the ranks wait for their disk, as a sentence; empty if they do not."""
NOT_SAVED = "not_saved"
"""In rank 0's record: which checkpoint the run goes on without, and why; empty if there is none."""
WORSE = "worse"
"""Entry of a rank's engine report: how far the trained weights are worse than the initial ones."""
BEST_EXPORT = f"{CHECKPOINTS}/{BEST}-export"
"""Folder of the best weights where nodes share no folder: a checkpoint of several nodes cannot be loaded."""
RETRY_SECONDS = 10.0
"""Time between two attempts."""
POLL_SECONDS = 1.0
"""Time between two looks for a stop."""
NUM_ATTEMPTS = 360
"""About an hour: a full disk is usually noticed by then, and the GPUs are paid for."""
NUM_ATTEMPTS_OF_STOP = 50
"""The same for a stop with a checkpoint, whose ranks are ended after ten minutes."""


def export_when_possible(
    ctx: TrainingContext, complete: Callable[[Path], None], *, has_best: bool = False
) -> None:
    """Export the weights into the run folder, all ranks together; ``complete`` adds files on rank 0.

    ``has_best``: those of :data:`BEST_EXPORT`, instead of the engine's.
    A write that the disk does not take is repeated for about an hour, until a stop is requested. Then raises
    ``RuntimeError`` with what is kept of the weights. Raises other errors at once.
    """
    # Weights that are written are not written again, for which the disk would need their size once more.
    export_weights = partial(_move_best, ctx.folder) if has_best else partial(ctx.engine.export, EXPORT)
    left = [export_weights, partial(_complete_together, ctx, complete)]

    def export() -> None:
        while left:
            left[0]()
            left.pop(0)

    def describe_kept(fix: str) -> str:
        if len(left) == 1:
            return f"{EXPORT} has the weights, but not all of their other files, such as the tokenizer"
        return _describe_kept(ctx, fix)

    _repeat(
        ctx,
        export,
        "the trained weights cannot be exported",
        describe_kept,
        NUM_ATTEMPTS,
        is_given_up=lambda stop_requested: stop_requested,
    )


def save_when_possible(ctx: TrainingContext, save: Callable[[], None], *, is_stopped: bool) -> None:
    """Save the checkpoint that nothing else will have the weights of, until a stop without a checkpoint.

    ``is_stopped``: after a stop that requested it, for less than ten minutes.
    """
    try:
        _repeat(
            ctx,
            save,
            "the checkpoint cannot be saved",
            partial(_describe_kept, ctx),
            NUM_ATTEMPTS_OF_STOP if is_stopped else NUM_ATTEMPTS,
            is_given_up=lambda _: ctx.stops_without_checkpoint,
        )
    except RuntimeError as error:
        # The same on all ranks. A stop that gives the checkpoint up is no failure.
        if not ctx.stops_without_checkpoint:
            raise
        if ctx.rank == 0:
            note_for_supervisor(ctx.folder, NOT_SAVED, str(error))


def _repeat(
    ctx: TrainingContext,
    write: Callable[[], None],
    problem: str,
    describe_kept: Callable[[str], str],
    num_attempts: int,
    *,
    is_given_up: Callable[[bool], bool],
) -> None:
    """Call ``write`` until the disk takes it, and record meanwhile why the ranks wait.

    ``is_given_up`` is called with whether any stop was requested. Raises ``RuntimeError`` after
    ``num_attempts`` or if it returns True, and other errors at once.
    """
    began = time.monotonic()
    for attempt in range(num_attempts):
        error = _try_to(write)
        if error is None:
            if attempt and ctx.rank == 0:
                note_for_supervisor(ctx.folder, WAITS, "")
            return
        why, fix = f"{problem}: {error.strerror}", find_disk_fix(error)
        if attempt == 0:
            print(f"{why}. The ranks keep the weights, and try again every {RETRY_SECONDS:.0f} s", flush=True)
        if ctx.rank == 0:
            period = "an hour" if num_attempts == NUM_ATTEMPTS else "ten minutes"
            waits = f"{why}. The ranks keep the weights and try again for {period}. Nearest fix: {fix}"
            note_for_supervisor(ctx.folder, WAITS, waits)
        if _is_given_up_while_waiting(ctx, is_given_up):
            break
    waited = format_count(round((time.monotonic() - began) / 60), "minute")
    raise RuntimeError(f"{why}, for {waited}. {describe_kept(fix)}") from error


def note_for_supervisor(folder: Path, key: str, text: str) -> None:
    """Write a sentence for the supervisor into a record so short that a full disk takes it."""
    path = RunFolder(folder).rank(0)
    with contextlib.suppress(OSError):
        write_json_on_full_disk(path, {**(read_json(path) or {}), key: text})


def _move_best(folder: Path) -> None:
    from shardscope.training.checkpoints.temporary_folder import (
        raising_on_all_ranks,
        replace_folder,
        writes_folder,
    )

    with raising_on_all_ranks():
        if writes_folder():
            replace_folder(folder / BEST_EXPORT, folder / EXPORT)


def _complete_together(ctx: TrainingContext, complete: Callable[[Path], None]) -> None:
    from shardscope.training.checkpoints.temporary_folder import raising_on_all_ranks

    with raising_on_all_ranks():
        if ctx.rank == 0:
            complete(ctx.folder / EXPORT)


def _try_to(write: Callable[[], None]) -> OSError | None:
    """Call ``write``. Return the disk's error, the same on all ranks; None without."""
    try:
        write()
    except OSError as error:
        if not is_disk_error(error):
            raise
        return error
    return None


def _is_given_up_while_waiting(ctx: TrainingContext, is_given_up: Callable[[bool], bool]) -> bool:
    """Wait until the next attempt; return whether a stop ends the waiting, the same on all ranks."""
    for _ in range(round(RETRY_SECONDS / POLL_SECONDS)):
        stop_requested, _ = ctx.poll()
        if is_given_up(stop_requested):
            return True
        time.sleep(POLL_SECONDS)
    return False


def _describe_kept(ctx: TrainingContext, fix: str) -> str:
    """Return what is kept of the weights that were not written, and how to go on after ``fix``."""
    done = ctx.engine.num_steps_done
    newest = next(reversed(list_resumable(ctx.folder)), None)
    fix = f"Nearest fix: {fix}, then launch again"
    if newest is None:
        return f"Nothing is kept of {format_count(done, 'step')}. {fix}"
    return f"{newest.relative_to(ctx.folder)} is kept. {fix} with resume={ctx.folder.name!r}"
