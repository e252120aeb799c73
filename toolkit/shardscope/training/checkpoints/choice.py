"""Which checkpoint a run resumes from: the only place that picks one. No torch: kernels ask too.

A checkpoint that the user names by its path is taken, and read with care. Where Shardscope picks
(``resume=True``, Resume in the list of runs), it takes those alone whose manifest proves that a launch of
this user saved them, and names the others: whoever can put a folder beside the user's runs could otherwise
choose what they continue from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardscope.core.errors import refuse
from shardscope.training.checkpoints.folders import checkpoints_of, is_whole
from shardscope.training.checkpoints.manifest import UnsignedError, check_signed, run_of

MAX_NAMED = 3
"""Checkpoints that were not taken and that a message names."""


@dataclass(frozen=True, kw_only=True)
class NotTaken:
    """A checkpoint without proof that this user's launch saved it."""

    path: Path
    why: str
    """A clause without its end."""

    def __str__(self) -> str:
        return f"{self.path}: {self.why}"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The checkpoint to resume from, None if there is none, and those before it that were not taken."""

    checkpoint: Path | None
    not_taken: tuple[NotTaken, ...] = ()

    @property
    def notice(self) -> str:
        """Sentences that name what was not taken; empty if nothing was passed over."""
        if not self.not_taken:
            return ""
        named = "; ".join(map(str, self.not_taken[:MAX_NAMED]))
        more = len(self.not_taken) - MAX_NAMED
        others = f"; and {more:,} more" if more > 0 else ""
        return f"not taken: {named}{others}. {self.how_to_take}."

    @property
    def how_to_take(self) -> str:
        """How the first of what was not taken is taken all the same, as a clause."""
        return (
            "If you trust it (it is yours, from another machine, say), name its path: "
            f"resume={str(self.not_taken[0].path)!r} loads tensors, plain values and its format's classes"
        )


def named_checkpoint(path: Path) -> Path | None:
    """Return what ``path`` stands for: a whole checkpoint itself, or the newest one of a run folder."""
    return path if is_whole(path) else newest_checkpoint(path)


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the whole checkpoint of most steps in a run folder, whoever saved it."""
    return next(reversed(checkpoints_of(folder)), None)


def choose_for_rank(folder: Path) -> Choice:
    """Choose for ``resume=True`` of the run in ``folder``: its own checkpoint, or that of an earlier run.

    That is the latest run launched by the same name that has one.
    """
    candidates = [folder]
    if (name := run_of(folder).name) is not None:
        candidates += (path for path in runs_by_name(folder.parent, name) if path != folder)
    return _choose(candidates)


def choose_by_name(parent: Path, name: str) -> Choice:
    """Choose what ``resume=True`` of a run that is launched by ``name`` in ``parent`` would resume from."""
    return _choose(runs_by_name(parent, name))


def choose_for_resume(folder: Path, description: Mapping[str, Any]) -> Choice:
    """Choose for a run of ``description`` that ended: its own checkpoint, or the one that it started from."""
    own = _choose([folder])
    if own.checkpoint is not None:
        return own
    asked = description.get("asked")
    before = asked.get("resume") if isinstance(asked, Mapping) else None
    if before is True:
        return choose_for_rank(folder)
    path = named_checkpoint(Path(before)) if isinstance(before, str) else None
    if path is None:
        return own
    # The folder says that its run started there, and anybody can write that.
    try:
        check_signed(path)
    except UnsignedError as error:
        return Choice(checkpoint=None, not_taken=(*own.not_taken, NotTaken(path=path, why=str(error))))
    return Choice(checkpoint=path, not_taken=own.not_taken)


def check_any_taken(choice: Choice, field: str) -> None:
    """Raise ``ValueError`` if there are checkpoints and ``choice`` takes none of them.

    A run that starts anew without a word is not what ``resume=True`` asks for.
    """
    if choice.checkpoint is None and choice.not_taken:
        refuse(
            field,
            True,
            f"a checkpoint that your own launches on this machine saved. {choice.notice[:1].upper()}"
            f"{choice.notice[1:].rstrip('.')}",
            f"resume={str(choice.not_taken[0].path)!r}, or resume=False to start anew",
        )


def runs_by_name(parent: Path, name: str) -> list[Path]:
    """Return the folders of runs in ``parent`` that say they were launched by ``name``, the latest first.

    ``launch(..., name="a")`` makes the folder ``a``, and ``a-2`` once there is one: both were launched by
    the name ``a``.
    """
    if not parent.is_dir():
        return []
    # Cheap first: a folder of runs may hold hundreds.
    named = (path for path in parent.iterdir() if path.name.startswith(name))
    runs = ((run.created or 0.0, path) for path in named if (run := run_of(path)).name == name)
    return [path for _, path in sorted(runs, reverse=True)]


def _choose(folders: list[Path]) -> Choice:
    not_taken: list[NotTaken] = []
    for folder in folders:
        newest: NotTaken | None = None
        for path in reversed(checkpoints_of(folder)):
            if (why := _why_not(path, folder)) is None:
                newest_first = (*not_taken, *filter(None, (newest,)))
                return Choice(checkpoint=path, not_taken=newest_first)
            newest = newest or NotTaken(path=path, why=why)
        not_taken += filter(None, (newest,))
    return Choice(checkpoint=None, not_taken=tuple(not_taken))


def _why_not(path: Path, folder: Path) -> str | None:
    try:
        signed = check_signed(path)
    except UnsignedError as error:
        return str(error)
    # Or a copy of an old checkpoint, in a folder that says it is a new run's, would be the newest.
    if signed != run_of(folder):
        return f"it was saved by another run than this folder says ({signed.name or 'one without a name'})"
    return None
