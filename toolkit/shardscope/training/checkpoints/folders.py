"""Which checkpoints a run has, and where they lie. No torch: kernels ask too.

A checkpoint is whole if its ``position.json`` is there: engines write it last, and rename the folder then.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

POSITION_FILE = "position.json"
CHECKPOINTS = "checkpoints"
_STEP = re.compile(r"step-(\d{6,})")


def checkpoint_path(folder: Path, num_steps_done: int) -> Path:
    """Where in a run folder the checkpoint after so many steps lies."""
    return Path(folder) / CHECKPOINTS / f"step-{num_steps_done:06d}"


def is_whole(path: Path) -> bool:
    """Whether ``path`` is a checkpoint that an engine wrote to its end."""
    return (path / POSITION_FILE).is_file()


def checkpoints_of(folder: Path) -> list[Path]:
    """The whole checkpoints of a run, in the order of their steps."""
    found = [
        (int(match[1]), path)
        for path in (Path(folder) / CHECKPOINTS).glob("step-*")
        if (match := _STEP.fullmatch(path.name)) and is_whole(path)
    ]
    return [path for _, path in sorted(found)]


def forget_older(folder: Path, keep_last: int) -> None:
    """Remove all whole checkpoints of a run but the ``keep_last`` of most steps."""
    for path in checkpoints_of(folder)[:-keep_last]:
        # Its name goes first: half a checkpoint must not be taken for a whole one.
        dying = path.with_name(f".{path.name}.old")
        shutil.rmtree(dying, ignore_errors=True)
        path.rename(dying)
        shutil.rmtree(dying, ignore_errors=True)
