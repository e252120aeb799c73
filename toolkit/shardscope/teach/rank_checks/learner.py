"""Calls of the learner's code on one rank, with a time limit."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

from shardscope.records.json_files import write_json
from shardscope.teach.rank_checks.reports import CALL_SECONDS, report_path

if TYPE_CHECKING:
    from shardscope.runs.launch.context import Context

EXIT_CODE = 7
"""Exit code of a rank whose code did not return."""


class ProblemError(Exception):
    """A wrong answer; the message tells the learner what is wrong with it."""


class LearnerError(Exception):
    """An exception that the learner's code raised; its cause is that exception."""


class OtherRankError(Exception):
    """Another rank has reported a problem, and will not call anything any more."""


class Learner:
    """The learner's code on this rank: each call has a time limit, and ends on all ranks before the next."""

    def __init__(self, ctx: Context, file_name: str) -> None:
        self.rank, self.world_size = ctx.rank, ctx.world_size
        self._folder, self._file_name = ctx.folder, file_name
        self._main_thread = threading.get_ident()
        self._num_calls = 0
        self._started = 0.0
        """Monotonic time at which the current call began; 0 outside calls."""
        threading.Thread(target=self._watch, daemon=True).start()

    def call(self, function: Callable[[], object]) -> object:
        """Call ``function`` and wait for the other ranks to return from it too.

        Raises :class:`LearnerError` for its exceptions, :class:`OtherRankError` where another rank has ended.
        """
        self._num_calls += 1
        # The limit begins when all ranks are here: one may be seconds behind on a busy machine.
        self._meet("begins")
        self._started = time.monotonic()
        try:
            result = function()
        except Exception as error:
            raise LearnerError from error
        # The watching thread ends this wait, where another rank never returns.
        self._meet("returned")
        self._started = 0.0
        return result

    def _meet(self, place: str) -> None:
        """Wait until all ranks are there. Raises :class:`OtherRankError` where another rank has ended."""
        (self._folder / f"{place}_{self._num_calls}_{self.rank}").touch()
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        while missing := [rank for rank in others if not self._has_come(place, rank)]:
            if any(map(self._has_reported, missing)):
                raise OtherRankError
            time.sleep(0.01)

    def report(self, **fields: object) -> None:
        """Write this rank's report, unless it has one."""
        if not self._has_reported(self.rank):
            write_json(report_path(self._folder, self.rank), {"time": time.time(), **fields})

    def report_exception(self, error: BaseException) -> None:
        """Report an exception of the learner's code, with the innermost line of the learner's cell."""
        text = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == self._file_name]
        self.report(problem="raised", error=text, file=self._file_name, line=lines[-1] if lines else None)

    def _has_come(self, place: str, rank: int) -> bool:
        return (self._folder / f"{place}_{self._num_calls}_{rank}").exists()

    def _has_reported(self, rank: int) -> bool:
        return report_path(self._folder, rank).exists()

    def _watch(self) -> None:
        """End this rank, with a report of its line, when a call does not return in time."""
        while not (started := self._started) or time.monotonic() - started < CALL_SECONDS:
            time.sleep(0.1)
        line = self._find_line(sys._current_frames().get(self._main_thread))
        self.report(problem="stuck", file=self._file_name, line=line)
        # The other rank's limit is over within moments: let it report where it is.
        time.sleep(1.5)
        os._exit(EXIT_CODE)

    def _find_line(self, frame: FrameType | None) -> int | None:
        """Return the innermost line of the learner's cell among ``frame`` and its callers."""
        while frame is not None:
            if frame.f_code.co_filename == self._file_name:
                return frame.f_lineno
            frame = frame.f_back
        return None
