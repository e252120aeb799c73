"""Real runs, each one folder on disk: launching (on Slurm and Ray too: ``backends/``), watching, stopping,
explaining and comparing them; merging, chatting with and publishing trained models; calibration.

Imports little: ``import shardscope`` imports this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os

    from shardscope.runs.explain.compare import Runs


def runs(folder: str | os.PathLike[str] | None = None) -> Runs:
    """Return all runs in ``folder`` (default ``./runs``), oldest first: a list with a table as its display.

    Damaged folders are rows of that table, with their summaries in ``.damaged``. Raises ``OSError`` if
    ``folder`` cannot be read.
    """
    from shardscope.records.folder import checked_path
    from shardscope.runs.explain.compare import Runs
    from shardscope.runs.summaries import describe_missing_folder, list_runs

    parent = checked_path("runs folder", "runs" if folder is None else folder)
    summaries = list_runs(parent)
    damaged = [summary for summary in summaries if summary.run is None]
    listed = Runs([summary.run for summary in summaries if summary.run is not None], damaged)
    listed.missing = describe_missing_folder(parent)
    return listed
