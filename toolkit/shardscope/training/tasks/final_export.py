"""The last writes of a run, of its export or checkpoint, repeated as long as the disk does not take them.

Without a checkpoint the trained weights are only in the memory of the ranks.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from shardscope.core.number_format import format_count
from shardscope.machine.os_errors import find_disk_fix, is_disk_error
from shardscope.records.folder import EXPORT, RunFolder
from shardscope.records.json_files import read_json, write_json_on_full_disk
from shardscope.training.checkpoints.folders import BEST, CHECKPOINTS, count_steps, list_resumable

if TYPE_CHECKING:
    from shardscope.training.engine import TrainingContext

Answer = TypeVar("Answer")

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
GIVE_UP_SECONDS = 3600.0
"""Time after which no attempt begins: a full disk is usually noticed by then, and the GPUs are paid for."""
GIVE_UP_SECONDS_OF_STOP = 500.0
"""The same after a stop with a checkpoint, whose ranks are ended after ten minutes."""


def export_when_possible(
    ctx: TrainingContext, complete: Callable[[Path], None], *, has_best: bool = False
) -> bool:
    """Export the weights into the run folder, all ranks together; ``complete`` adds files on rank 0.

    ``has_best``: those of :data:`BEST_EXPORT`, instead of the engine's.
    A write that the disk does not take is repeated for about an hour, or for ten minutes after a stop with a
    checkpoint. Then raises ``RuntimeError`` with what is kept of the weights. Raises other errors at once.
    Return False if a stop gave the export up: one without a checkpoint, or if a checkpoint has the weights.
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

    def is_kept() -> bool:
        # Not only the newest one: early stopping exports the best weights, which may be older.
        return any(kept.num_steps_done == ctx.engine.num_steps_done for kept in _list_kept(ctx))

    problem = "the trained weights cannot be exported"
    return _repeat(ctx, export, problem, describe_kept, is_stopped=False, is_kept=is_kept)


def save_when_possible(ctx: TrainingContext, save: Callable[[], None], *, is_stopped: bool) -> None:
    """Save the checkpoint that nothing else will have the weights of, until a stop without a checkpoint.

    ``is_stopped``: after a stop that requested it, for less than ten minutes.
    """
    problem, describe_kept = "the checkpoint cannot be saved", partial(_describe_kept, ctx)
    _repeat(ctx, save, problem, describe_kept, is_stopped=is_stopped, is_kept=lambda: False)


def _repeat(
    ctx: TrainingContext,
    write: Callable[[], None],
    problem: str,
    describe_kept: Callable[[str], str],
    *,
    is_stopped: bool,
    is_kept: Callable[[], bool],
) -> bool:
    """Call ``write`` until the disk takes it, and record meanwhile why the ranks wait.

    ``is_stopped``: whether a stop with a checkpoint was requested before. ``is_kept`` returns whether a
    checkpoint has the weights. Return False if a stop gives the write up, which is no failure. Raises
    ``RuntimeError`` after too long a time, and other errors at once.
    """
    began, is_first = time.monotonic(), True
    until = began + (GIVE_UP_SECONDS_OF_STOP if is_stopped else GIVE_UP_SECONDS)
    while True:
        error = _try_to(write)
        if error is None:
            if not is_first and ctx.rank == 0:
                note_for_supervisor(ctx.folder, WAITS, "")
            return True
        why, fix = f"{problem}: {error.strerror}", find_disk_fix(error)
        if is_first:
            print(f"{why}. The ranks keep the weights, and try again every {RETRY_SECONDS:.0f} s", flush=True)
        if ctx.rank == 0:
            period = "ten minutes" if is_stopped else "an hour"
            waits = f"{why}. The ranks keep the weights and try again for {period}. Nearest fix: {fix}"
            note_for_supervisor(ctx.folder, WAITS, waits)
        is_first = False
        stop_requested = _wait_for_next_attempt(ctx, is_stopped)
        if stop_requested and not is_stopped:
            # The ranks are ended some time after a stop with a checkpoint.
            is_stopped, until = True, time.monotonic() + GIVE_UP_SECONDS_OF_STOP
        is_given_up = ctx.stops_without_checkpoint or (is_stopped and is_kept())
        # An attempt may itself take minutes, so they are not counted.
        if is_given_up or _ask_rank_0(time.monotonic() >= until):
            break
    minutes = round((time.monotonic() - began) / 60)
    waited = f", for {format_count(minutes, 'minute')}" if minutes else ""
    failure = f"{why}{waited}. {describe_kept(fix)}"
    if not is_given_up:
        raise RuntimeError(failure) from error
    # Without it, through Ray, it would be a failure of the ranks.
    if ctx.rank == 0:
        note_for_supervisor(ctx.folder, NOT_SAVED, failure)
    return False


def note_for_supervisor(folder: Path, key: str, text: str) -> None:
    """Write a sentence for the supervisor into a record so short that a full disk takes it."""
    path = RunFolder(folder).rank(0)
    with contextlib.suppress(OSError):
        write_json_on_full_disk(path, {**(read_json(path) or {}), key: text})


def _move_best(folder: Path) -> None:
    from shardscope.training.checkpoints.temporary_folder import raise_on_all_ranks, replace_on_all_nodes

    replace_on_all_nodes(folder / BEST_EXPORT, folder / EXPORT, raise_on_all_ranks)


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


def _wait_for_next_attempt(ctx: TrainingContext, is_stopped: bool) -> bool:
    """Wait until the next attempt, or for a stop other than the one of ``is_stopped``.

    Return whether a stop was requested, the same on all ranks.
    """
    stop_requested = is_stopped
    for _ in range(round(RETRY_SECONDS / POLL_SECONDS)):
        stop_requested, _ = ctx.poll()
        if ctx.stops_without_checkpoint or (stop_requested and not is_stopped):
            return True
        time.sleep(POLL_SECONDS)
    return stop_requested


class _Kept(NamedTuple):
    name: str
    """Path of the checkpoint in the run folder."""
    num_steps_done: int


def _list_kept(ctx: TrainingContext) -> list[_Kept]:
    """Return the checkpoints in the order of their steps, the same on all ranks."""
    kept = [
        _Kept(str(path.relative_to(ctx.folder)), count_steps(path)) for path in list_resumable(ctx.folder)
    ]
    # Where nodes share no folder, only rank 0's has complete checkpoints.
    return _ask_rank_0(kept)


def _ask_rank_0(answer: Answer) -> Answer:
    """Return the ``answer`` of rank 0. Collective."""
    import torch
    import torch.distributed as dist

    answers = [answer]
    if dist.is_initialized():
        dist.broadcast_object_list(answers, src=0, device=torch.device("cpu"))  # gloo, which every run has.
    return answers[0]


def _describe_kept(ctx: TrainingContext, fix: str) -> str:
    """Return what is kept of the weights that were not written, and how to go on after ``fix``."""
    done = ctx.engine.num_steps_done
    kept = _list_kept(ctx)
    fix = f"Nearest fix: {fix}, then launch again"
    if not kept:
        return f"Nothing is kept of {format_count(done, 'step')}. {fix}"
    return f"{kept[-1].name} is kept. {fix} with resume={ctx.folder.name!r}"
