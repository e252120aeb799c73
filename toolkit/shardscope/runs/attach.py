"""Opening the run of a folder that the user names, and error messages that list the runs nearby."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from shardscope.core.errors import FieldError, find_similar
from shardscope.records.folder import FINAL, RunFolder, checked_path
from shardscope.records.folder_checks import check_file_kinds, check_supervisor
from shardscope.runs.backends.ray.puller import continue_stream
from shardscope.runs.run import Run
from shardscope.runs.summaries import is_run, list_runs
from shardscope.training.tasks.resumed_checkpoint import DEFAULT_FOLDER

MAX_NAMES = 20
"""Maximum number of run names listed in an error message, the newest ones."""
MAX_PATHS = 5
"""Maximum number of paths of runs in an error message."""


def attach_run(folder: str | os.PathLike[str]) -> Run:
    """Return a handle on the run in ``folder``; see :meth:`Run.attach`.

    Raises ``ValueError``, and ``PermissionError`` for another user's run that only its owner can read.
    """
    path = checked_path("Run.attach folder", folder).absolute()
    try:
        return _find_run(path)
    except PermissionError as error:
        owner = _find_other_owner(path)
        if not owner:
            raise
        text = (
            f"The run folder {path} belongs to {owner}, and cannot be read by you: {error.strerror}. "
            f"Nearest fix: {owner} runs chmod -R go+rX on it"
        )
        raise PermissionError(error.errno, text) from error


def _find_run(path: Path) -> Run:
    if is_run(path):
        return _open_run(path)
    if not path.exists():
        raise _describe_refusal(path, "does not exist")
    summaries = list_runs(path)
    undamaged = [summary for summary in summaries if summary.run is not None]
    if len(undamaged) == 1:
        return _open_run(path / undamaged[0].name)
    names = [
        summary.name if summary.run is not None else f"{summary.name} (damaged)" for summary in summaries
    ]
    contents = _join_newest(names, MAX_NAMES) or "no run at all"
    newest = str(path / undamaged[-1].name) if undamaged else None
    raise _describe_refusal(path, f"is not a run folder; it contains: {contents}", newest)


def _describe_refusal(path: Path, problem: str, fix: str | None = None) -> FieldError:
    """Return the error of a folder that is no run, with the runs nearby.

    ``fix`` is the nearest run; None: find it among them.
    """
    # As typed in the folder of a project, whose runs are in ``runs``; and where ss.launch makes runs.
    parents = (path.parent, path.parent / DEFAULT_FOLDER, Path(DEFAULT_FOLDER).absolute())
    created = {
        parent / summary.name: summary.created
        for parent in dict.fromkeys(parents)
        for summary in list_runs(parent)
        if summary.run is not None
    }
    nearby = sorted(created, key=lambda run: created[run])
    listed = f"; runs nearby: {_join_newest(nearby, MAX_PATHS)}" if nearby and fix is None else ""
    if fix is None and nearby:
        similar = find_similar(path.name, [run.name for run in nearby])
        fix = str(next((run for run in nearby if run.name == similar), nearby[-1]))
    allowed = f"the folder of a run: {path} {problem}{listed}"
    return FieldError("Run.attach folder", str(path), allowed, fix or "the path that run.folder has")


def _find_other_owner(path: Path) -> str:
    """Return the name of the user who owns ``path``; empty if it is this one, or not known."""
    try:
        if path.stat().st_uid == os.geteuid():
            return ""
        return path.owner()
    except (OSError, KeyError, AttributeError, NotImplementedError):  # Windows has neither.
        return ""


def _join_newest(runs: Sequence[object], limit: int) -> str:
    """Return the last ``limit`` of ``runs`` with commas, and how many there are before them."""
    listed = ", ".join(map(str, runs[-limit:]))
    return f"{len(runs) - limit} older, {listed}" if len(runs) > limit else listed


def _open_run(path: Path) -> Run:
    """Return a handle on the run in ``path``; resume its stream of files if its nodes share no folder."""
    folder = RunFolder(path)
    # Check every file's kind before any is opened: opening a pipe in a run folder would block forever.
    check_file_kinds(folder, inside=True)
    check_supervisor(folder)
    run = Run(folder)
    if run.status not in FINAL:
        with contextlib.suppress(OSError):  # The folder may be another user's.
            continue_stream(folder)
    return run
