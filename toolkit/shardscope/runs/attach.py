"""Opening the run of a folder that the user names, and error messages that list the runs nearby."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from shardscope.records.folder import FINAL, RunFolder, checked_path
from shardscope.records.folder_checks import check_file_kinds, check_supervisor
from shardscope.runs.backends.ray.puller import continue_stream
from shardscope.runs.run import Run
from shardscope.runs.summaries import is_run, list_runs

MAX_NAMES = 20
"""Maximum number of run names listed in an error message."""


def attach_run(folder: str | os.PathLike[str]) -> Run:
    """Return a handle on the run in ``folder``; see :meth:`Run.attach`. Raises ``ValueError``."""
    path = checked_path("Run.attach folder", folder).absolute()
    if is_run(path):
        return _open_run(path)
    if not path.exists():
        # As typed in the folder of a project, whose runs are in ``runs``.
        parents = (path.parent, path.parent / "runs")
        nearby = [str(parent / summary.name) for parent in parents for summary in list_runs(parent)]
        listed = f"; runs there: {', '.join(nearby[:MAX_NAMES])}" if nearby else ""
        raise ValueError(f"folder is {path}, which does not exist{listed}.")
    summaries = list_runs(path)
    undamaged = [summary for summary in summaries if summary.run is not None]
    if len(undamaged) == 1:
        return _open_run(path / undamaged[0].name)
    names = [
        summary.name if summary.run is not None else f"{summary.name} (damaged)"
        for summary in summaries[:MAX_NAMES]
    ]
    if len(summaries) > MAX_NAMES:
        names.append(f"{len(summaries) - MAX_NAMES} more")
    contents = ", ".join(names) or "no run at all"
    raise ValueError(f"folder is {path}, which is not a run folder; it contains: {contents}.")


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
