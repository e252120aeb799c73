"""Checkpoint folders of a run. Imports no torch, so that kernels can use it.

A checkpoint is complete if it has a ``position.json``: engines write it last, and then rename the folder.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from shardscope.records.json_files import read_json
from shardscope.records.json_values import is_int

POSITION_FILE = "position.json"
CHECKPOINTS = "checkpoints"
BEST = "best"
"""Name of the checkpoint with the lowest validation loss; never deleted by ``keep_last``."""
OWN_FOLDER = "SHARDSCOPE_OWN_FOLDER"
"""Environment variable, "1" where each node has a run folder of its own: no file system is shared."""
_STEP = re.compile(r"step-(\d{6,})")


def checkpoint_path(folder: Path, num_steps_done: int) -> Path:
    """Return the path of the checkpoint after ``num_steps_done`` steps in a run folder."""
    return Path(folder) / CHECKPOINTS / f"step-{num_steps_done:06d}"


def is_complete(path: Path) -> bool:
    """Return whether ``path`` is a complete checkpoint."""
    return (path / POSITION_FILE).is_file()


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a run, in the order of their steps."""
    return [path for path in _list_folders(folder) if is_complete(path)]


def list_resumable(folder: Path) -> list[Path]:
    """Return the same with the best one of early stopping, often the only one of a run that was killed.

    Of two with as many steps the best one comes first.
    """
    best = Path(folder) / CHECKPOINTS / BEST
    if not is_complete(best):
        return list_checkpoints(folder)
    return sorted([best, *list_checkpoints(folder)], key=count_steps)


def count_steps(path: Path) -> int:
    """Return the number of steps after which a complete checkpoint was saved; 0 if it does not say."""
    if (match := _STEP.fullmatch(path.name)) is not None:
        return int(match[1])
    num_steps = (read_json(path / POSITION_FILE) or {}).get("num_steps_done")
    return num_steps if is_int(num_steps) else 0


def _list_folders(folder: Path) -> list[Path]:
    numbered = [
        (int(match[1]), path)
        for path in (Path(folder) / CHECKPOINTS).glob("step-*")
        if (match := _STEP.fullmatch(path.name))
    ]
    return [path for _, path in sorted(numbered)]


def delete_unfinished(folder: Path) -> None:
    """Delete checkpoints of a run that were never completed or half deleted; no rank may write one."""
    # Not only those of steps: the best one of early stopping is written in the same way.
    for ending in ("partial", "old"):
        for path in (Path(folder) / CHECKPOINTS).glob(f".*.{ending}"):
            replaced = path.with_name(path.name[1:].removesuffix(f".{ending}"))
            if ending == "old" and not _STEP.fullmatch(replaced.name) and not replaced.exists():
                # The run was killed between the two renames of a new one: it is the only copy.
                path.rename(replaced)
            shutil.rmtree(path, ignore_errors=True)


def delete_older(folder: Path, keep_last: int, *, parts: bool = False) -> None:
    """Delete all complete checkpoints of a run except the latest ``keep_last``.

    ``parts``: those of a node that has only its own ranks' files of them.
    """
    for path in (_list_folders(folder) if parts else list_checkpoints(folder))[:-keep_last]:
        # Rename before deleting: a half-deleted checkpoint must not look complete.
        doomed = path.with_name(f".{path.name}.old")
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
