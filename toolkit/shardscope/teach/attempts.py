"""Attempts on disk: one JSON-lines file per learner, and the table of all learners' progress.

The files are in ``answers/`` beside the notebook, or in the folder that ``SHARDSCOPE_ANSWERS`` names, which a
workshop's learners may share. They are records, not secrets and not exams: a learner can edit the own file.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from shardscope.core.html_table import render_html_table
from shardscope.records.json_files import append_line, read_lines

if TYPE_CHECKING:
    import pandas as pd

FOLDER = "answers"
MAX_TEXT = 300
"""Characters of an answer that are stored."""
MAX_FILES = 2000
"""Most learners' files that :func:`progress` reads."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One checked answer of one learner."""

    exercise: str
    answer: str
    """The answer as text, shortened; for code, layouts and plans with the first characters of a hash."""
    correct: bool
    valid: bool = True
    """Whether the answer had the right kind."""
    time: float = 0.0
    """Seconds since 1970."""
    tier: str = ""
    """Tier of a puzzle's check."""
    tokens_per_second_per_gpu: float = 0.0
    """Predicted speed of a puzzle's solution; 0 for anything else."""

    @property
    def shown_answer(self) -> str:
        """The answer as text, without the hash that tells it from others with the same text."""
        return re.sub(r" [0-9a-f]{8}$", "", self.answer)


def find_learner() -> str:
    """Return the learner's name for files: ``$JUPYTERHUB_USER``, or the name of this user."""
    name = os.environ.get("JUPYTERHUB_USER") or ""
    if not name:
        # No entry in the password database and no variable: containers with a numeric user.
        with contextlib.suppress(KeyError, OSError, ImportError):
            name = getpass.getuser()
    name = name or "learner"
    safe = re.sub(r"[^\w.@-]+", "-", name, flags=re.ASCII).strip(".-")[:64]
    # Two names that differ in replaced characters only have files of their own.
    if safe != name:
        safe = f"{safe or 'learner'}-{hashlib.sha256(name.encode(errors='replace')).hexdigest()[:6]}"
    return safe


def find_folder() -> Path:
    """Return the folder of this learner's file."""
    return Path(os.environ.get("SHARDSCOPE_ANSWERS") or FOLDER)


def find_file() -> Path:
    """Return this learner's file, which may not exist yet."""
    return find_folder() / f"{find_learner()}.jsonl"


def store_attempt(attempt: Attempt) -> str:
    """Append ``attempt`` to this learner's file. Return why it was not stored, or ``""``."""
    path = find_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if os.environ.get("SHARDSCOPE_ANSWERS") and not path.exists():
            # In a shared folder the instructor reads the file through its group; elsewhere it is 0600.
            with contextlib.suppress(FileExistsError):
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o640))
        append_line(path, {**vars(attempt), "answer": attempt.answer[:MAX_TEXT], "time": time.time()})
    except OSError as error:
        return f"This attempt is not stored: {path} cannot be written ({error.strerror or error})."
    return ""


def read_attempts(path: Path | None = None) -> list[Attempt]:
    """Return the attempts of one file (default: this learner's), oldest first; damaged lines are left out."""
    try:
        records = read_lines(path or find_file())
    except (OSError, ValueError):
        return []
    return [attempt for record in records if (attempt := _read_attempt(record)) is not None]


def list_wrong_answers(attempts: Iterable[Attempt], exercise: str) -> list[str]:
    """Return the different wrong answers of an exercise, in the order in which each was first given.

    The place of an answer is that of its hint. Repeating an answer repeats its hint: a notebook may run all
    of its cells again.
    """
    wrong = (one for one in attempts if one.exercise == exercise and one.valid and not one.correct)
    return list(dict.fromkeys(attempt.answer for attempt in wrong))


def _read_attempt(record: dict[str, object]) -> Attempt | None:
    """Return the attempt of one record, or None if the record is damaged."""
    exercise, answer, when = record.get("exercise"), record.get("answer"), record.get("time")
    correct, valid = record.get("correct"), record.get("valid", True)
    if not isinstance(exercise, str) or not isinstance(answer, str) or not isinstance(correct, bool):
        return None
    if not isinstance(when, int | float) or isinstance(when, bool) or not isinstance(valid, bool):
        return None
    tier, speed = record.get("tier", ""), record.get("tokens_per_second_per_gpu", 0.0)
    if not isinstance(tier, str) or not isinstance(speed, int | float) or isinstance(speed, bool):
        return None
    return Attempt(
        exercise=exercise,
        answer=answer,
        correct=correct,
        valid=valid,
        time=float(when),
        tier=tier,
        tokens_per_second_per_gpu=float(speed),
    )


@dataclass(frozen=True, kw_only=True)
class LearnerProgress:
    """Exercises that one learner has solved and tried."""

    learner: str
    solved: tuple[str, ...]
    """Solved exercises and puzzles, in the order of solving."""
    tried: tuple[str, ...]
    """Exercises that have wrong answers only."""
    num_attempts: int
    last_exercise: str
    last_time: float
    """Time of the last attempt, in seconds since 1970; 0 without one."""


class Progress(tuple[LearnerProgress, ...]):
    """Progress of all learners of one folder, displayed as a table at the end of a notebook cell."""

    __slots__ = ()

    def to_frame(self) -> pd.DataFrame:
        """Return one row per learner, with a column per notebook (``01`` to ``09``, ``30``, ``puzzle``)."""
        import pandas as pd

        rows = [dict(zip(self._head(), row, strict=True)) for row in self._rows()]
        return pd.DataFrame(rows, columns=self._head()).set_index("learner")

    def _parts(self) -> list[str]:
        return sorted({_get_part(name) for one in self for name in (*one.solved, *one.tried)})

    def _head(self) -> list[str]:
        return ["learner", "solved", "attempts", "stuck at", *self._parts(), "last attempt"]

    def _rows(self) -> list[list[object]]:
        parts = self._parts()
        rows: list[list[object]] = []
        for one in self:
            counts = [sum(_get_part(name) == part for name in one.solved) for part in parts]
            last = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.last_time)) if one.last_time else ""
            stuck = one.last_exercise if one.last_exercise in one.tried else ""
            rows.append([one.learner, len(one.solved), one.num_attempts, stuck, *counts, last])
        return rows

    def _repr_html_(self) -> str:
        return render_html_table(self._head(), self._rows(), "Solved exercises by notebook")

    def __repr__(self) -> str:
        lines = [f"{one.learner}: {len(one.solved)} solved, {one.num_attempts} attempts" for one in self]
        return "\n".join(lines) or "no answers yet"


def _get_part(name: str) -> str:
    """Return the notebook's number of an exercise ("01"), or "puzzle"."""
    return name.partition("-")[0]


def progress(folder: str | os.PathLike[str] | None = None) -> Progress:
    """Return every learner's progress from the ``.jsonl`` files of one folder, those who solved most first.

    Files in ``answers/`` folders below it count too, so that the folder of all homes of a JupyterHub works.
    Default: the folder of the own answers. Raises ``NotADirectoryError`` if it is no folder,
    and ``PermissionError`` if this user may not list it; of their own shared folder, learners get their own
    progress then.
    """
    root = find_folder() if folder is None else Path(folder)
    if folder is not None and not root.is_dir():
        raise NotADirectoryError(f"{root} is no folder")
    attempts: dict[str, list[Attempt]] = {}
    for path in _list_files(root):
        attempts.setdefault(path.stem, []).extend(read_attempts(path))
    found = [_sum_up(learner, tries) for learner, tries in sorted(attempts.items()) if tries]
    return Progress(sorted(found, key=lambda one: (-len(one.solved), one.learner)))


class LeaderboardRow(TypedDict):
    """One learner's fastest solution of one puzzle."""

    puzzle: str
    learner: str
    tokens_per_second_per_gpu: float
    tiers: str
    """The tiers that this learner's solutions passed."""
    layout: str


class Leaderboard(tuple[LeaderboardRow, ...]):
    """Solutions of one folder's learners, displayed as a table at the end of a notebook cell."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        head = [name.replace("_", " ") for name in LeaderboardRow.__annotations__]
        return render_html_table(head, [list(row.values()) for row in self], "Leaderboard")


def leaderboard(folder: str | os.PathLike[str] | None = None) -> Leaderboard:
    """Return each learner's fastest solution of each puzzle, the fastest first; files as in
    :func:`progress`."""
    root = find_folder() if folder is None else Path(folder)
    rows: list[LeaderboardRow] = []
    for path in _list_files(root):
        solved: dict[str, list[Attempt]] = {}
        for attempt in read_attempts(path):
            if attempt.correct and attempt.tokens_per_second_per_gpu > 0:
                solved.setdefault(attempt.exercise, []).append(attempt)
        for puzzle, attempts in solved.items():
            best = max(attempts, key=lambda attempt: attempt.tokens_per_second_per_gpu)
            rows.append(
                {
                    "puzzle": puzzle.removeprefix("puzzle-"),
                    "learner": path.stem,
                    "tokens_per_second_per_gpu": best.tokens_per_second_per_gpu,
                    "tiers": ", ".join(dict.fromkeys(attempt.tier for attempt in attempts)),
                    "layout": best.shown_answer,
                }
            )
    return Leaderboard(sorted(rows, key=lambda row: (row["puzzle"], -row["tokens_per_second_per_gpu"])))


def _list_files(root: Path) -> Iterable[Path]:
    """Return the learners' files directly in ``root`` and in its ``answers/`` folders."""
    if root.is_dir() and not os.access(root, os.R_OK):
        # Of a shared folder only the instructors' group may list the files.
        own = find_file()
        if own.parent != root:
            raise PermissionError(f"{root} cannot be listed by this user")
        return [own]
    found = [*sorted(root.glob("*.jsonl")), *sorted(root.rglob(f"{FOLDER}/*.jsonl"))]
    return list(dict.fromkeys(found))[:MAX_FILES]


def _sum_up(learner: str, attempts: Sequence[Attempt]) -> LearnerProgress:
    attempts = sorted(attempts, key=lambda attempt: attempt.time)
    solved = tuple(dict.fromkeys(attempt.exercise for attempt in attempts if attempt.correct))
    tried = dict.fromkeys(attempt.exercise for attempt in attempts if attempt.exercise not in solved)
    return LearnerProgress(
        learner=learner,
        solved=solved,
        tried=tuple(tried),
        num_attempts=len(attempts),
        last_exercise=attempts[-1].exercise,
        last_time=attempts[-1].time,
    )
