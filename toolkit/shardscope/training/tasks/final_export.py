"""The export of the weights at the end of a run, repeated as long as the disk does not take it.

Without a checkpoint the trained weights are only in the memory of the ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.core.number_format import format_count
from shardscope.records.folder import EXPORT
from shardscope.training.checkpoints.folders import list_resumable

if TYPE_CHECKING:
    from shardscope.training.engine import TrainingContext

ENTRY = "export"
"""Entry of rank 0's engine report about the export."""
WAITS = "waits"
"""In that entry: why the ranks wait to export, as a sentence."""
WORSE = "worse"
"""Entry of a rank's engine report: how far the trained weights are worse than the initial ones."""
RETRY_SECONDS = 10.0
"""Time between two attempts."""
POLL_SECONDS = 1.0
"""Time between two looks for a stop."""
NUM_ATTEMPTS = 360
"""About an hour: a full disk is usually noticed by then, and the GPUs are paid for."""


def export_when_possible(ctx: TrainingContext, complete: Callable[[Path], None]) -> None:
    """Export the weights into the run folder, all ranks together; ``complete`` adds files on rank 0.

    A write that fails, as on a full disk, is repeated for about an hour, until a stop is requested. Then
    raises ``RuntimeError`` with what is kept of the weights.
    """
    began = time.monotonic()
    for attempt in range(NUM_ATTEMPTS):
        error = _try_to_export(ctx, complete)
        if error is None:
            return
        why = f"the trained weights cannot be exported: {error.strerror}"
        if attempt == 0:
            print(f"{why}. The ranks keep them, and try again every {RETRY_SECONDS:.0f} s", flush=True)
        # The supervisor reads it.
        fix = (
            f"{why}. The ranks keep them and try again for an hour. Nearest fix: free some space on that disk"
        )
        ctx.record(ENTRY, {WAITS: fix})
        if _is_stopped_while_waiting(ctx):
            break
    waited = format_count(round((time.monotonic() - began) / 60), "minute")
    raise RuntimeError(f"{why}, for {waited}. {_describe_kept(ctx)}") from error


def _try_to_export(ctx: TrainingContext, complete: Callable[[Path], None]) -> OSError | None:
    """Return the error of the export, the same on all ranks; None if it is complete."""
    from shardscope.training.checkpoints.temporary_folder import raising_on_all_ranks

    try:
        ctx.engine.export(EXPORT)
        with raising_on_all_ranks():
            if ctx.rank == 0:
                complete(ctx.folder / EXPORT)
    except OSError as error:
        return error
    return None


def _is_stopped_while_waiting(ctx: TrainingContext) -> bool:
    """Wait until the next attempt; return whether a stop was requested meanwhile, the same on all ranks."""
    for _ in range(round(RETRY_SECONDS / POLL_SECONDS)):
        stop_requested, _ = ctx.poll()
        if stop_requested:
            return True
        time.sleep(POLL_SECONDS)
    return False


def _describe_kept(ctx: TrainingContext) -> str:
    """Return which checkpoint has the weights that were not exported, and how to go on."""
    done = ctx.engine.num_steps_done
    newest = next(reversed(list_resumable(ctx.folder)), None)
    fix = "Nearest fix: free some space, then launch again"
    if newest is None:
        return f"Nothing is kept of {format_count(done, 'step')}. {fix}"
    return f"{newest.relative_to(ctx.folder)} is kept. {fix} with resume={ctx.folder.name!r}"
