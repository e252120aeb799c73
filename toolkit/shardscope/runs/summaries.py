"""Summaries of all runs in a folder: a few small reads per run, and none for an unchanged ended one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.machine.os_errors import describe_shortage
from shardscope.records.clock_offsets import sum_seconds
from shardscope.records.folder import FINAL, RunFolder
from shardscope.records.folder_checks import check_file_kinds, shorten_message
from shardscope.records.json_files import finite_or_special, parse_lines, read_tail
from shardscope.records.json_values import is_number
from shardscope.runs.resume import why_not_resumable
from shardscope.runs.run import Run

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

TAIL_BYTES = 8 * 1024
"""Bytes read from the end of rank 0's metrics: about ten lines of a task that logs thirty metrics."""
DAMAGED = "damaged"
"""The status of a folder that cannot be read; no run has it."""


@dataclass(frozen=True, eq=False)
class RunSummary:
    """One run of a list. The fields are cheap; the properties read files on first access."""

    name: str
    run: Run | None
    """The run; None if the folder is damaged."""
    damage: str = ""
    """Reason why the folder cannot be read; "" if it can."""
    status: str = DAMAGED
    """Status of the run, or "damaged"."""
    reason: str = ""
    is_hanging: bool = False
    """Whether the ranks of a running run make no progress."""
    created: float = 0.0
    """Launch time in seconds since the epoch; 0 if unknown."""

    @property
    def is_live(self) -> bool:
        """Return whether the run has not ended yet."""
        return self.run is not None and self.status not in FINAL

    @cached_property
    def plan(self) -> Plan | None:
        """The plan, or None if it cannot be read."""
        try:
            return None if self.run is None else self.run.plan
        except Exception:  # A plan of another version, or an edited one: the run is still listed.
            return None

    @cached_property
    def last_metrics(self) -> dict[str, object]:
        """The last value of each metric in the last lines that rank 0 logged."""
        return {} if self.run is None else _read_last_metrics(RunFolder(self.run.folder).events(0))

    @property
    def loss(self) -> float | None:
        """The last loss that rank 0 logged; None if it logged none."""
        return _to_float(self.last_metrics.get("loss"))

    @property
    def num_steps_done(self) -> int | None:
        """Number of steps up to the last one logged by rank 0, including those before a resume."""
        step = _to_float(self.last_metrics.get("step"))
        return int(step) + 1 if step is not None and 0 <= step < 1e15 else None

    @property
    def num_steps(self) -> int | None:
        """Number of steps that the task was launched for; None if the task has no limit."""
        return None if self.run is None else self.run.num_steps

    @cached_property
    def seconds(self) -> float | None:
        """Seconds from the launch to the end, or until now."""
        if self.run is None:
            return None
        times = [when for line in self.run.history if (when := _to_float(line["time"])) is not None]
        if not times:
            return None
        return sum_seconds([*times, time.time()] if self.is_live else times)

    @cached_property
    def has_trace(self) -> bool:
        """Return whether the run recorded a trace."""
        return self.run is not None and any(RunFolder(self.run.folder).traces.glob("*.json.gz"))

    @cached_property
    def failed_early(self) -> bool:
        """Return whether the run ended before its task was finished."""
        return self.status in ("stopped", "failed", "lost")

    @cached_property
    def why_not_resumable(self) -> str | None:
        """Why the run cannot be resumed, as one sentence; None if it can."""
        if self.run is None:
            return self.damage
        try:
            return why_not_resumable(self.run)
        except Exception as error:  # Damaged run.json: return the error as the reason.
            return f"Its folder cannot be read: {type(error).__name__}."

    @cached_property
    def resumed_from(self) -> str | None:
        """Name of the run whose checkpoint this one started from; None if it started from step 0."""
        fields = None if self.run is None else self.run.task_fields
        path = fields.get("resume") if fields is not None else None
        if not isinstance(path, str):
            return None
        checkpoint = Path(path)
        # .../<run>/checkpoints/step-000010, or the folder of the run itself.
        return checkpoint.parents[1].name if checkpoint.parent.name == "checkpoints" else checkpoint.name


class RunSummaries:
    """Cached summaries of the runs in ``folder``: live runs first, then the newest first."""

    def __init__(self, folder: str | os.PathLike[str] = "runs") -> None:
        self.folder = Path(folder)
        self._known: dict[Path, tuple[tuple[int, ...], RunSummary]] = {}
        """By run folder: the modification times of its files and the summary read at that time."""

    def read(self) -> list[RunSummary]:
        """Return a summary of each run, damaged ones included. Raises ``OSError`` if listing them fails."""
        known = {path: self._summarize(path) for path in find_run_folders(self.folder)}
        self._known = known
        summaries = [summary for _, summary in known.values()]
        return sorted(
            summaries, key=lambda summary: (summary.is_live, summary.created, summary.name), reverse=True
        )

    def _summarize(self, path: Path) -> tuple[tuple[int, ...], RunSummary]:
        folder = RunFolder(path)
        files = (folder.run_json, folder.status, folder.events(0), folder.traces, path / "checkpoints")
        modified_ns = tuple(map(_read_modified_ns, files))
        cached = self._known.get(path)
        # A live run may change without a change of its files: it may become lost.
        if cached is not None and cached[0] == modified_ns and not cached[1].is_live:
            return cached
        # Reuse the handle unless run.json was replaced: it measures the age of the heartbeat of a run on
        # another machine.
        run = cached[1].run if cached is not None and cached[0][0] == modified_ns[0] else None
        return modified_ns, summarize(path, run)


def find_run_folders(parent: Path) -> Iterator[Path]:
    """Yield the run folders in ``parent``, damaged ones included; none if ``parent`` does not exist.

    Other files and folders in ``parent`` are skipped. Raises ``OSError`` if ``parent`` cannot be listed.
    """
    try:
        entries = list(os.scandir(parent))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        try:
            is_folder = entry.is_dir()
        except OSError:  # A symbolic link in a loop, or into another user's folder.
            continue
        path = Path(entry.path)
        # The folder of a launch in progress is hidden.
        if is_folder and entry.name[0] != "." and is_run(path):
            yield path


def describe_missing_folder(parent: Path) -> str:
    """Return why ``parent`` has no runs, to append to a sentence; empty if it is a folder."""
    if parent.is_dir():
        return ""
    return f": {parent.absolute()} {'is no folder' if parent.exists() else 'does not exist'}"


def is_run(path: Path) -> bool:
    """Return whether ``path`` contains one of the two files of every run, readable or not."""
    # lexists, because a dangling link makes a damaged run, which is listed, not a missing one.
    return os.path.lexists(path / "run.json") or os.path.lexists(path / "status.jsonl")


def list_runs(parent: Path) -> list[RunSummary]:
    """Return a summary of each run in ``parent``, damaged ones included, oldest first. Raises ``OSError``."""
    return sorted(
        map(summarize, find_run_folders(parent)), key=lambda summary: (summary.created, summary.name)
    )


def summarize(path: Path, run: Run | None = None) -> RunSummary:
    """Return the summary of the run in ``path``, using its handle ``run`` if given.

    Any problem with the folder becomes the summary's ``damage``. Raises ``OSError`` if this process has no
    file descriptors or memory left.
    """
    folder = RunFolder(path)
    try:
        check_file_kinds(folder)
        run = Run(folder) if run is None else run
        return RunSummary(
            name=path.name,
            run=run,
            status=run.status,
            reason=run.reason,
            is_hanging=run.is_hanging,
            created=run.created,
        )
    except Exception as error:  # One damaged folder must not hide the others.
        if isinstance(error, OSError) and describe_shortage(error):
            raise
        damage = shorten_message(folder, error)
        return RunSummary(name=path.name, run=None, damage=damage, created=_read_modified_ns(path) / 1e9)


def _read_last_metrics(path: Path) -> dict[str, object]:
    """Return the last value of each metric in the tail of ``path``, a file of JSON lines."""
    metrics: dict[str, object] = {}
    data = read_tail(path, TAIL_BYTES)
    # A line without its newline is still being written; the first line may be incomplete.
    for record in reversed(parse_lines(data[: data.rfind(b"\n") + 1]).records):
        metrics = {**{name: finite_or_special(value) for name, value in record.items()}, **metrics}
    return metrics


def _to_float(value: object) -> float | None:
    # A loss may be infinite or NaN, which `is_number` rejects.
    return float(value) if isinstance(value, float) or is_number(value) else None


def _read_modified_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
