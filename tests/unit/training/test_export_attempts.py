"""The attempts of the final export: which errors are worth waiting for, and what is written again."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.requirements import needs

from shardscope.records.folder import RunFolder
from shardscope.records.json_files import read_json, write_json
from shardscope.runs.launch.supervision.stop_sequence import CHECKPOINT_GRACE_SECONDS
from shardscope.training.tasks import final_export

needs("torch")

NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class OneRank:
    """The context of a run with one rank, and its engine."""

    rank, num_steps_done = 0, 2
    stops_without_checkpoint = False

    def __init__(self, folder: Path, *errors: Exception) -> None:
        self.folder, self.engine, self.errors = folder, self, list(errors)
        self.exports: list[str] = []
        RunFolder(folder).rank(0).parent.mkdir()
        write_json(RunFolder(folder).rank(0), {"pid": 1})
        self.reasons: list[object] = []

    def export(self, name: str) -> None:
        self.exports.append(name)
        if self.errors:
            raise self.errors.pop(0)

    def read_reason(self) -> object:
        return (read_json(RunFolder(self.folder).rank(0)) or {}).get(final_export.WAITS)

    def poll(self) -> tuple[bool, list[dict[str, object]]]:
        self.reasons.append(self.read_reason())
        return False, []


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardscope.training.checkpoints import temporary_folder

    monkeypatch.setattr(temporary_folder, "raising_on_all_ranks", contextlib.nullcontext)
    monkeypatch.setattr(final_export, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(final_export, "POLL_SECONDS", 0.01)


def export(ctx: OneRank, complete: Callable[[Path], None] = lambda folder: None) -> None:
    untyped: Any = ctx
    final_export.export_when_possible(untyped, complete)


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "weights/tokenizer.json"),
        OSError("Can't load tokenizer for 'weights'"),  # transformers'.
        RuntimeError("no"),
    ],
)
def test_an_error_that_no_space_cures_is_raised_at_once(error: Exception, tmp_path: Path) -> None:
    """The ranks waited for an hour, for free space."""
    ctx = OneRank(tmp_path, error)
    with pytest.raises(type(error)) as raised:
        export(ctx)
    assert raised.value is error and len(ctx.exports) == 1 and ctx.read_reason() is None


@pytest.mark.parametrize(
    ("number", "fix"),
    [(errno.ENOSPC, "free some space"), (errno.EDQUOT, "free some space"), (errno.EACCES, "writable again")],
)
def test_the_fix_is_that_of_the_error(number: int, fix: str, tmp_path: Path) -> None:
    ctx = OneRank(tmp_path, OSError(number, os.strerror(number)))
    export(ctx)
    assert len(ctx.exports) == 2 and fix in str(ctx.reasons[0]) and ctx.read_reason() == ""


def test_weights_that_are_written_are_not_written_again_for_their_tokenizer(tmp_path: Path) -> None:
    """Each attempt needed space for the weights a second time."""
    errors = [NO_SPACE, NO_SPACE]

    def complete(folder: Path) -> None:
        if errors:
            raise errors.pop()

    ctx = OneRank(tmp_path)
    export(ctx, complete)
    assert len(ctx.exports) == 1 and not errors


def test_a_run_that_gives_up_says_that_the_weights_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(final_export, "GIVE_UP_SECONDS", 0.05)

    def complete(folder: Path) -> None:
        raise NO_SPACE

    with pytest.raises(RuntimeError, match="export has the weights, but not") as raised:
        export(OneRank(tmp_path), complete)
    assert "Nothing is kept" not in str(raised.value)


class Clock:
    """Stands for the module ``time``."""

    seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


class StopsWhileItWaits(OneRank):
    """Gets a stop with a checkpoint at the first poll. Each of its attempts writes for a minute."""

    clock = Clock()

    def export(self, name: str) -> None:
        self.clock.sleep(60)
        raise NO_SPACE

    def poll(self) -> tuple[bool, list[dict[str, object]]]:
        return True, []


def test_ranks_give_up_before_a_stop_ends_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They made fifty attempts, however long each took: an hour, for ranks that are killed in ten minutes."""
    monkeypatch.setattr(final_export, "time", StopsWhileItWaits.clock)
    monkeypatch.setattr(final_export, "RETRY_SECONDS", 10.0)
    monkeypatch.setattr(final_export, "POLL_SECONDS", 1.0)
    with pytest.raises(RuntimeError, match="Nothing is kept of 2 steps"):
        export(StopsWhileItWaits(tmp_path))
    since_stop = StopsWhileItWaits.clock.seconds - 60
    assert 400 < since_stop < CHECKPOINT_GRACE_SECONDS


def test_a_stop_ends_the_waiting_if_the_best_checkpoint_has_the_weights(tmp_path: Path) -> None:
    """Only the newest one was looked at: early stopping exports the best weights, which are often older."""
    for name, num_steps in (("best", 2), ("step-000004", 4)):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        position = {"num_steps_done": num_steps}
        write_json(tmp_path / "checkpoints" / name / "position.json", position)
    ctx = StopsWhileItWaits(tmp_path)
    untyped: Any = ctx
    assert not final_export.export_when_possible(untyped, lambda folder: None)
