"""Choice of the checkpoint from which a run resumes. Imports no torch, so that kernels can use it.

A checkpoint that the user names by its path is always used, and loaded with restrictions. Where Shardscope
chooses (``resume=True``, Resume in the list of runs), it uses only checkpoints whose manifest proves that a
launch of this user saved them, and reports the others: anyone who can write to the folder of runs could
otherwise choose the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shardscope.core.errors import refuse
from shardscope.training.checkpoints.folders import is_complete, list_resumable
from shardscope.training.checkpoints.manifest import UnsignedError, check_signed, find_damage, read_run

MAX_NAMED = 3
"""Maximum number of skipped checkpoints named in a message."""


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A skipped checkpoint: a damaged one, or one without proof that this user's launch saved it."""

    path: Path
    why: str
    """Reason, a clause without a period."""
    is_damaged: bool = False
    """Whether files are missing or truncated, so that its path raises ``ValueError``."""

    def __str__(self) -> str:
        return f"{self.path}: {self.why}"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The checkpoint to resume from, None if there is none, and the newer ones that were skipped."""

    checkpoint: Path | None
    skipped: tuple[Skipped, ...] = ()

    @property
    def notice(self) -> str:
        """Sentences that name the skipped checkpoints; empty if there are none."""
        if not self.skipped:
            return ""
        listed = "; ".join(map(str, self.skipped[:MAX_NAMED]))
        more = len(self.skipped) - MAX_NAMED
        rest = f"; and {more:,} more" if more > 0 else ""
        return f"not used: {listed}{rest}. {self.how_to_use}".rstrip(" .") + "."

    @property
    def loadable(self) -> Skipped | None:
        """The first skipped checkpoint with all of its files, which loads by its path; None if none has."""
        return next((skipped for skipped in self.skipped if not skipped.is_damaged), None)

    @property
    def how_to_use(self) -> str:
        """Clause that says how to use :attr:`loadable` anyway; empty if it is None."""
        if self.loadable is None:
            return ""
        which = "it" if len(self.skipped) == 1 else self.loadable.path.name
        return (
            f"If you trust {which} (you saved it on another machine, say), name its path: "
            f"resume={str(self.loadable.path)!r} loads tensors, plain values and its format's classes"
        )


def find_checkpoint(path: Path) -> Path | None:
    """Return ``path`` if it is a complete checkpoint, else the newest one of the run folder ``path``."""
    return path if is_complete(path) else find_newest_checkpoint(path)


def find_newest_checkpoint(folder: Path) -> Path | None:
    """Return a run folder's complete checkpoint with the most steps, whichever user saved it."""
    return next(reversed(list_resumable(folder)), None)


def choose_for_rank(folder: Path) -> Choice:
    """Choose for ``resume=True`` of the run in ``folder``: its own checkpoint, or that of an earlier run.

    The earlier run is the latest one with a checkpoint that was launched with the same name.
    """
    candidates = [folder]
    if (name := read_run(folder).name) is not None:
        candidates += (path for path in list_runs_by_name(folder.parent, name) if path != folder)
    return _choose_newest(candidates)


def choose_by_name(parent: Path, name: str) -> Choice:
    """Choose the checkpoint for ``resume=True`` of a run that is launched with ``name`` in ``parent``."""
    return _choose_newest(list_runs_by_name(parent, name))


def choose_for_resume(folder: Path, description: Mapping[str, object]) -> Choice:
    """Choose for an ended run with ``description``: its own checkpoint, or the one that it started from."""
    own_choice = _choose_newest([folder])
    if own_choice.checkpoint is not None:
        return own_choice
    requested = description.get("asked")
    resumed_from = requested.get("resume") if isinstance(requested, Mapping) else None
    # resume=True chose by the run's name when it was launched, and does so again.
    if resumed_from is True:
        return choose_for_rank(folder)
    path = find_checkpoint(Path(resumed_from)) if isinstance(resumed_from, str) else None
    if path is None:
        return own_choice
    # run.json names that path, but is not protected against changes by others: check the signature.
    try:
        check_signed(path)
    except UnsignedError as error:
        return Choice(checkpoint=None, skipped=(*own_choice.skipped, _describe_unsigned(path, error)))
    return Choice(checkpoint=path, skipped=own_choice.skipped)


def check_any_usable(choice: Choice, field: str) -> None:
    """Raise ``ValueError`` if there are checkpoints and ``choice`` skipped all of them.

    With ``resume=True`` a run must not silently start from step 0.
    """
    if choice.checkpoint is None and choice.skipped:
        named = "" if choice.loadable is None else f"resume={str(choice.loadable.path)!r}, or "
        refuse(
            field,
            True,
            "a complete checkpoint that your own launches on this machine saved. "
            f"{choice.notice[:1].upper()}{choice.notice[1:].rstrip('.')}",
            f"{named}resume=False to start from the beginning",
        )


def list_runs_by_name(parent: Path, name: str) -> list[Path]:
    """Return the folders of runs in ``parent`` launched with ``name``, by their ``run.json``, latest first.

    ``launch(..., name="a")`` creates the folder ``a``, or ``a-2`` if that exists: both were launched with the
    name ``a``.
    """
    if not parent.is_dir():
        return []
    # Filter by folder name first, without reading files: there may be hundreds of runs.
    listed = (path for path in parent.iterdir() if path.name.startswith(name))
    runs = ((run.created or 0.0, path) for path in listed if (run := read_run(path)).name == name)
    return [path for _, path in sorted(runs, reverse=True)]


def _choose_newest(folders: list[Path]) -> Choice:
    # Report the newest skipped checkpoint of each folder only: all older ones would have the same reason.
    # If it is damaged, also the newest one that its path loads.
    skipped: list[Skipped] = []
    for folder in folders:
        reported: list[Skipped] = []
        for path in reversed(list_resumable(folder)):
            if (reason := _explain_skip(path, folder)) is None:
                return Choice(checkpoint=path, skipped=(*skipped, *reported))
            if not reported or (all(known.is_damaged for known in reported) and not reason.is_damaged):
                reported.append(reason)
        skipped += reported
    return Choice(checkpoint=None, skipped=tuple(skipped))


def _explain_skip(path: Path, folder: Path) -> Skipped | None:
    try:
        saved_by = check_signed(path)
    except UnsignedError as error:
        return _describe_unsigned(path, error)
    # Otherwise a copy of an old checkpoint in a forged folder of a new run would count as the newest.
    if saved_by != read_run(folder):
        name = saved_by.name or "one without a name"
        return Skipped(path=path, why=f"it was saved by another run than this folder says ({name})")
    return None


def _describe_unsigned(path: Path, error: UnsignedError) -> Skipped:
    # A disk that was full or a copy that was interrupted leaves truncated files. Their signature fails too,
    # but trusting them does not help.
    damage = find_damage(path)
    return Skipped(path=path, why=damage or str(error), is_damaged=damage is not None)
