"""Which checkpoints runs have, where, and which of them a run goes on from. No torch: kernels ask too.

A checkpoint is whole if its ``position.json`` is there: engines write it last, and rename the folder then.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from shardscope.runs.folder import RunFolder
from shardscope.runs.records import read_json

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


def newest_checkpoint(folder: Path) -> Path | None:
    """The whole checkpoint of most steps in a run folder."""
    return next(reversed(checkpoints_of(folder)), None)


def checkpoint_in(path: Path) -> Path | None:
    """What ``path`` stands for: itself if it is a whole checkpoint, the newest one if it is a run folder."""
    return path if is_whole(path) else newest_checkpoint(path)


def earlier_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint of this run or, if it has none, of the latest run launched by its name."""
    own = newest_checkpoint(folder)
    name = (read_json(RunFolder(folder).run_json) or {}).get("asked_name")
    if own is not None or not isinstance(name, str):
        return own
    return checkpoint_by_name(Path(folder).parent, name)


def checkpoint_by_name(parent: Path, name: str) -> Path | None:
    """The newest whole checkpoint of the latest run in ``parent`` that was launched by ``name`` and has one.

    ``launch(..., name="a")`` makes the folder ``a``, and ``a-2`` once there is one: both were launched by
    the name ``a``.
    """
    if not parent.is_dir():
        return None
    runs = [(_created(path), path) for path in parent.iterdir() if _was_asked(path, name)]
    found = (newest_checkpoint(path) for _, path in sorted(runs, reverse=True))
    return next((path for path in found if path is not None), None)


def forget_older(folder: Path, keep_last: int) -> None:
    """Remove all whole checkpoints of a run but the ``keep_last`` of most steps."""
    for path in checkpoints_of(folder)[:-keep_last]:
        # Its name goes first: half a checkpoint must not be taken for a whole one.
        dying = path.with_name(f".{path.name}.old")
        shutil.rmtree(dying, ignore_errors=True)
        path.rename(dying)
        shutil.rmtree(dying, ignore_errors=True)


def _was_asked(path: Path, name: str) -> bool:
    # Cheap first: a folder of runs may hold hundreds.
    if not path.name.startswith(name):
        return False
    record: dict[str, Any] = read_json(RunFolder(path).run_json) or {}
    return record.get("asked_name") == name


def _created(path: Path) -> float:
    created = (read_json(RunFolder(path).run_json) or {}).get("created", 0)
    return float(created) if isinstance(created, int | float) else 0.0
