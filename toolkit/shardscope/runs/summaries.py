"""Summaries of all runs in a folder, for a list: a few small reads per run, and none for an unchanged one."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from shardscope.runs.folder import FINAL, RunFolder, Status
from shardscope.runs.records import finite_or_special, parse_json, read_json, read_tail_text
from shardscope.runs.resume import why_not_resumable
from shardscope.runs.run import Run

if TYPE_CHECKING:
    from shardscope.plan import Plan

TAIL_BYTES = 8 * 1024
"""Read from the end of rank 0's metrics: some ten lines of a task that logs thirty metrics."""
KNOWN_STATUSES: frozenset[str] = frozenset(get_args(Status))
UNKNOWN = "unknown"


@dataclass(frozen=True, eq=False)
class RunSummary:
    """One run of a list. Its fields are cheap; its properties read files once, when a row is first shown."""

    name: str
    run: Run | None
    """None where the folder is damaged."""
    damage: str = ""
    """Why the folder cannot be read."""
    status: str = UNKNOWN
    """One of the statuses of a run, or "unknown" for anything else that a file may say."""
    reason: str = ""
    created: float = 0.0
    """Seconds since the epoch; 0 where not known."""
    description: dict[str, Any] = field(default_factory=dict)

    @property
    def is_living(self) -> bool:
        """Whether the run has not ended yet."""
        return self.run is not None and self.status != UNKNOWN and self.status not in FINAL

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
        asked = self.description.get("asked")
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
        if not self.folder.is_dir():
            self._known = {}
            return []
        known: dict[Path, tuple[tuple[int, ...], RunSummary]] = {}
        for path in self.folder.iterdir():
            # A folder without both files is no run: users keep other things beside their runs.
            if _is_run(path):
                known[path] = self._summary(path)
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


def summarize(path: Path, run: Run | None = None) -> RunSummary:
    """Return the summary of the run in ``path``, by its handle if there is one already.

    Never raises: whatever is wrong becomes the summary's ``damage``.
    """
    try:
        folder = RunFolder(path)
        run = Run(folder) if run is None else run
        description = read_json(folder.run_json) or {}
        status = run.status
        known = status if status in KNOWN_STATUSES else UNKNOWN
        return RunSummary(
            name=path.name,
            run=run,
            status=known,
            reason=run.reason if known != UNKNOWN else "status.jsonl holds a status that no run has",
            created=_number(description.get("created")) or 0.0,
            description=description,
        )
    except Exception as error:  # One damaged folder must not hide the others.
        words = str(error) if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {error}"
        short = words.replace(f"{path.absolute()}{os.sep}", "")
        return RunSummary(name=path.name, run=None, damage=short, created=_modified(path) / 1e9)


def _last_metrics(path: Path) -> dict[str, Any]:
    """Return the last value of each metric in the tail of ``path``, a file of JSON lines."""
    found: dict[str, Any] = {}
    text = read_tail_text(path, TAIL_BYTES)
    # A line without its newline is still being written; the first one may have been cut.
    for line in reversed(text[: text.rfind("\n") + 1].splitlines()):
        try:
            record = parse_json(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            found = {**{name: finite_or_special(value) for name, value in record.items()}, **found}
    return found


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _is_run(path: Path) -> bool:
    try:
        return (
            path.name[0] != "."
            and path.is_dir()
            and ((path / "run.json").exists() or (path / "status.jsonl").exists())
        )
    except OSError:  # Another user's folder, or a link in a circle.
        return False


def _modified(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
