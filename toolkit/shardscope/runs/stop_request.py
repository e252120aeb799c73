"""Stop requests to a run: their origin as text, and whether the run's task reads them at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import PurePath
from typing import Literal

from shardscope.records.folder import RunFolder
from shardscope.records.json_files import read_json, read_lines, write_json_on_full_disk

Button = Literal["Stop", "Save and stop"]
"""The buttons that request a stop; "Save and stop" with a checkpoint."""
MAX_NAME = 100
MAX_REASON = 300
READS_STOPS = "looks_for_stop"
READS_COMMANDS = "looks_for_commands"
SAW_STOP = "saw_stop"
"""In a rank's record: its task polled the commands after a stop had been requested."""


def find_notebook() -> str | None:
    """Return the file name of the notebook whose kernel this process is; None if unknown.

    Jupyter's server sets JPY_SESSION_NAME when it starts the kernel, so a notebook renamed later has its
    original name.
    """
    name = PurePath(os.environ.get("JPY_SESSION_NAME", "")).name
    return name if name.endswith(".ipynb") else None


def describe_stop_request(command: Mapping[str, object]) -> str:
    """Describe the origin of a stop command of ``control.jsonl``.

    For example ``Stop was pressed in 00_studio.ipynb`` or ``run.stop() was called``.
    """
    saving = command.get("checkpoint") is True
    if command.get("kernel_ended") is True:
        return "the kernel that launched it ended"
    scheduler = command.get("scheduler")
    if isinstance(scheduler, str):
        return "".join(filter(str.isprintable, scheduler))[:MAX_REASON]
    if command.get("button") is not None:
        action = f"{'Save and stop' if saving else 'Stop'} was pressed"
    elif command.get("sweep") is True:
        action = "sweep.stop() was called"
    else:
        action = f"run.stop({'checkpoint=True' if saving else ''}) was called"
    notebook = command.get("notebook")
    # Other programs may write commands too: limit the name to one line of printable characters.
    name = "".join(filter(str.isprintable, notebook))[:MAX_NAME] if isinstance(notebook, str) else ""
    return f"{action} in {name}" if name else action


def was_stopped_by_sweep(folder: RunFolder) -> bool:
    """Return whether the stop of its sweep was the first one that this run was sent."""
    stops = (command for command in read_lines(folder.control) if command.get("command") == "stop")
    return next(stops, {}).get("sweep") is True


def record_reader(folder: RunFolder, rank: int, kind: str) -> None:
    """Note in a rank's record that its task reads stop requests or commands, or has read a stop.

    Raises ``OSError``.
    """
    write_json_on_full_disk(folder.rank(rank), {**(read_json(folder.rank(rank)) or {}), kind: True})


def every_rank_reads_stops(folder: RunFolder, world_size: int) -> bool:
    """Return whether the task has read stop requests on every rank.

    Otherwise a stop could hang the run: ranks that leave would be waited for by those that do not look.
    """
    return _every_rank_reads(folder, world_size, READS_STOPS)


def marks_steps(folder: RunFolder, world_size: int) -> bool:
    """Return whether the task has read ``ctx.should_stop`` or ``ctx.commands()`` on every rank.

    These calls are the boundaries of a function's steps: all ranks obey a request at the same one.
    """
    return any(_every_rank_reads(folder, world_size, kind) for kind in (READS_STOPS, READS_COMMANDS))


def _every_rank_reads(folder: RunFolder, world_size: int, kind: str) -> bool:
    return all((read_json(folder.rank(rank)) or {}).get(kind) is True for rank in range(world_size))
