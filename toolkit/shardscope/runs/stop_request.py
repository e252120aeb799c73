"""Asking a run to stop: who asked, in words, and whether its ranks look at all whether somebody did."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, Literal

from shardscope.records.files import keep_json, read_json
from shardscope.records.folder import RunFolder

Button = Literal["Stop", "Save and stop"]
"""The buttons that ask a run to stop; the second one with a checkpoint."""
MAX_NAME = 100
_MARK = "looks_for_stop"


def notebook() -> str | None:
    """The notebook that this process is the kernel of, by its file's name; None where nobody says so.

    Jupyter's server tells a kernel when it starts it; a notebook that was renamed since has its first name.
    """
    name = PurePath(os.environ.get("JPY_SESSION_NAME", "")).name
    return name if name.endswith(".ipynb") else None


def who_asked(command: Mapping[str, Any]) -> str:
    """``Stop was pressed in 00_studio.ipynb``, ``run.stop() was called``: of a command of control.jsonl."""
    saving = command.get("checkpoint") is True
    if command.get("button") is not None:
        what = f"{'Save and stop' if saving else 'Stop'} was pressed"
    else:
        what = f"run.stop({'checkpoint=True' if saving else ''}) was called"
    where = command.get("notebook")
    # Whoever can write the folder can write here: one line, and no longer than a name.
    name = "".join(filter(str.isprintable, where))[:MAX_NAME] if isinstance(where, str) else ""
    return f"{what} in {name}" if name else what


def note_that_it_looks(folder: RunFolder, rank: int) -> None:
    """Keep in a rank's record that its task looks whether a stop was asked. Raises ``OSError``."""
    keep_json(folder.rank(rank), {**(read_json(folder.rank(rank)) or {}), _MARK: True})


def every_rank_looks(folder: RunFolder, world_size: int) -> bool:
    """Whether the task has looked on every rank: with one that does not, the others would wait for it."""
    return all((read_json(folder.rank(rank)) or {}).get(_MARK) is True for rank in range(world_size))
