"""Summaries of all runs in a folder, for a list: a few small reads per run, and none for an unchanged one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardscope.machine.os_errors import describe_shortage
from shardscope.records.damage import check_kinds, short_words
from shardscope.records.files import finite_or_special, parse_lines, read_tail
from shardscope.records.folder import FINAL, RunFolder
from shardscope.records.json_values import is_number
from shardscope.runs.resume import why_not_resumable
from shardscope.runs.run import Run

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

TAIL_BYTES = 8 * 1024
"""Read from the end of rank 0's metrics: some ten lines of a task that logs thirty metrics."""
DAMAGED = "damaged"
"""The status of a folder that cannot be read; no run has it."""


@dataclass(frozen=True, eq=False)
class RunSummary:
    """One run of a list. Its fields are cheap; its properties read files once, when a row is first shown."""

    name: str
    run: Run | None
    """None where the folder is damaged."""
    damage: str = ""
    """Why the folder cannot be read."""
    status: str = DAMAGED
    """One of the statuses of a run, or "damaged"."""
    reason: str = ""
    created: float = 0.0
    """Seconds since the epoch; 0 where not known."""

    @property
    def is_living(self) -> bool:
        """Whether the run has not ended yet."""
        return self.run is not None and self.status not in FINAL

    @cached_property
    def plan(self) -> Plan | None:
        """The plan, or None if it cannot be read."""
        try:
            return None if self.run is None else self.run.plan
        except (
            Exception
        ):  # A plan of another version, or one that was edited: the run is listed all the same.
            return None

    @cached_property
    def last(self) -> dict[str, Any]:
        """The last value of each metric in the last lines that rank 0 logged."""
        return {} if self.run is None else _last_metrics(RunFolder(self.run.folder).events(0))

    @property
    def loss(self) -> float | None:
        """The last loss that rank 0 logged; None if it logged none."""
        return _number(self.last.get("loss"))

    @property
    def num_steps_done(self) -> int | None:
        """Steps up to the last one that rank 0 logged, those before a resume included."""
        step = _number(self.last.get("step"))
        return int(step) + 1 if step is not None and 0 <= step < 1e15 else None

    @property
    def num_steps(self) -> int | None:
        """Steps that the task was launched for; None where a task has no such number."""
        return None if self.run is None else self.run.num_steps

    @cached_property
    def seconds(self) -> float | None:
        """Seconds from the launch to the end, or until now."""
        if self.run is None:
            return None
        times = [when for line in self.run.history if (when := _number(line["time"])) is not None]
        if not times:
            return None
        return max(0.0, (time.time() if self.is_living else times[-1]) - times[0])

    @cached_property
    def has_trace(self) -> bool:
        """Whether the run recorded a trace."""
        return self.run is not None and any(RunFolder(self.run.folder).traces.glob("*.json.gz"))

    @cached_property
    def failed_early(self) -> bool:
        """Whether the run ended before its task did."""
        return self.status in ("stopped", "failed", "lost")

    @cached_property
    def why_not_resumable(self) -> str | None:
        """Why the run cannot be resumed, as one sentence; None if it can."""
        if self.run is None:
            return self.damage
        try:
            return why_not_resumable(self.run)
        except Exception as error:  # Whatever run.json holds: it becomes the reason.
            return f"Its folder cannot be read: {type(error).__name__}."

    @cached_property
    def resumed_from(self) -> str | None:
        """The run whose checkpoint this one started from, by name; None if it started from the beginning."""
        asked = None if self.run is None else self.run.asked
        path = asked.get("resume") if isinstance(asked, dict) else None
        if not isinstance(path, str):
            return None
        named = Path(path)
        # .../<run>/checkpoints/step-000010, or the folder of the run itself.
        return named.parents[1].name if named.parent.name == "checkpoints" else named.name


class RunSummaries:
    """The runs in ``folder``, living ones first, then the newest first."""

    def __init__(self, folder: str | os.PathLike[str] = "runs") -> None:
        self.folder = Path(folder)
        self._known: dict[Path, tuple[tuple[int, ...], RunSummary]] = {}
        """By run folder: modification times of its files, and what was read at these."""

    def read(self) -> list[RunSummary]:
        """Return a summary of each run, damaged ones included. Raises ``OSError`` if it cannot list them."""
        known = {path: self._summary(path) for path in run_folders(self.folder)}
        self._known = known
        summaries = [summary for _, summary in known.values()]
        return sorted(summaries, key=lambda one: (one.is_living, one.created, one.name), reverse=True)

    def _summary(self, path: Path) -> tuple[tuple[int, ...], RunSummary]:
        folder = RunFolder(path)
        files = (folder.run_json, folder.status, folder.events(0), folder.traces, path / "checkpoints")
        changed = tuple(map(_modified, files))
        before = self._known.get(path)
        # Of a living run more changes than its files: it may be lost.
        if before is not None and before[0] == changed and not before[1].is_living:
            return before
        # The same handle again, unless run.json was replaced: it measures for how long the heartbeat of a run
        # on another machine has stood still.
        run = before[1].run if before is not None and before[0][0] == changed[0] else None
        return changed, summarize(path, run)


def run_folders(parent: Path) -> Iterator[Path]:
    """Yield the folders in ``parent`` that a run made, damaged ones included; none if there is no ``parent``.

    Users keep other things beside their runs. Raises ``OSError`` if ``parent`` cannot be listed.
    """
    try:
        entries = list(os.scandir(parent))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        try:
            is_folder = entry.is_dir()
        except OSError:  # A link in a circle, or into another user's folder.
            continue
        path = Path(entry.path)
        # A launch under way has a hidden folder.
        if is_folder and entry.name[0] != "." and is_run(path):
            yield path


def is_run(path: Path) -> bool:
    """Whether ``path`` has the name of one of the two files that every run has, whatever stands there."""
    return os.path.lexists(path / "run.json") or os.path.lexists(path / "status.jsonl")


def list_runs(parent: Path) -> list[RunSummary]:
    """Return a summary of each run in ``parent``, damaged ones included, oldest first. Raises ``OSError``."""
    return sorted(map(summarize, run_folders(parent)), key=lambda one: (one.created, one.name))


def summarize(path: Path, run: Run | None = None) -> RunSummary:
    """Return the summary of the run in ``path``, by its handle if there is one already.

    Whatever is wrong with the folder becomes the summary's ``damage``. Raises ``OSError`` where this process
    lacks descriptors or memory.
    """
    folder = RunFolder(path)
    try:
        check_kinds(folder)
        run = Run(folder) if run is None else run
        return RunSummary(name=path.name, run=run, status=run.status, reason=run.reason, created=run.created)
    except Exception as error:  # One damaged folder must not hide the others.
        if isinstance(error, OSError) and describe_shortage(error):
            raise
        damage = short_words(folder, error)
        return RunSummary(name=path.name, run=None, damage=damage, created=_modified(path) / 1e9)


def _last_metrics(path: Path) -> dict[str, Any]:
    """Return the last value of each metric in the tail of ``path``, a file of JSON lines."""
    found: dict[str, Any] = {}
    data = read_tail(path, TAIL_BYTES)
    # A line without its newline is still being written; the first one may have been cut.
    for record in reversed(parse_lines(data[: data.rfind(b"\n") + 1]).records):
        found = {**{name: finite_or_special(value) for name, value in record.items()}, **found}
    return found


def _number(value: Any) -> float | None:
    # A loss may be infinite, or not a number.
    return float(value) if isinstance(value, float) or is_number(value) else None


def _modified(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
