"""A standstill of a task that logs no steps: no output, no CPU time, no files, the same place in the code.

Where steps are logged, ``hang.py`` judges. Here nothing tells how long a step takes, so all
of that has to hold for ten minutes. A rank that uses its core is never told, though it may spin for ever (or
a GPU's driver for it): no sign from outside tells that from honest work. Its stack does not: one call into a
library (a decomposition, a compiler, a tokenizer over a corpus) stands at one line for hours, and so does a
loop over such calls. Its variables do not, for what moves may be bytes behind them. That all others wait for
it in a collective does not: rank 0 may prepare what they will read. A false alarm would teach people to
overlook a true one. A task that calls ``ctx.log`` as it goes is judged by its steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shardscope.records.folder import RunFolder
from shardscope.records.regular_files import size_of
from shardscope.runs.watch.hang import BUSY_FACTOR, MAX_GAP_SECONDS, default_least_seconds
from shardscope.runs.watch.stack_calls import ANSWER_SECONDS, NO_ANSWER, StackCalls, places
from shardscope.runs.watch.stacks import busy_with, main_thread

QUIET_FACTOR = 10.0
"""Times what is too long for a step at the least."""
NUM_SAMPLES = 60
"""Of what ranks do, until they are called still."""
CPU_SHARE = 0.02
"""Of one core, of a rank with all that it started: what threads use that only wait."""
FILE_BYTES = 2**20
"""Read or written by a rank between two samples: less is no data loader's."""


class Activity(NamedTuple):
    """What one rank did so far."""

    cpu_seconds: float
    """With all that it started, those that ended and were waited for included."""
    file_bytes: int
    printed_bytes: int


class QuietWatch:
    """One run's; ``look`` once a second."""

    def __init__(self, folder: RunFolder, world_size: int, *, quiet_seconds: float | None = None) -> None:
        self.folder = folder
        self.quiet_seconds = (
            QUIET_FACTOR * default_least_seconds() if quiet_seconds is None else quiet_seconds
        )
        self.hangs = False
        """Whether the run was said to stand still, and has not moved since."""
        self._calls = StackCalls(folder, world_size)
        self._before: dict[int, Activity] = {}
        self._since_sample = 0.0
        self._quiet = 0.0
        self._stood: Mapping[int, str] | None = None
        """Where ranks stood half way through."""
        self._asked_since: float | None = None
        self._limit = self.quiet_seconds

    def look(
        self, new: Mapping[int, Sequence[Mapping[str, Any]]], seconds: float, *, has_steps: bool
    ) -> str | None:
        """``new``: records by rank; ``seconds``: since the last look; ``has_steps``: others judge.

        What changed, in words, or None.
        """
        self._since_sample += min(seconds, MAX_GAP_SECONDS)
        if self._asked_since is not None:
            self._asked_since += seconds
            if self._asked_since >= ANSWER_SECONDS:
                self._asked_since = None
                answers = self._calls.answers()
                return self._take({rank: answers[rank] for rank in self._before})  # Others have ended.
        if has_steps or any(new.values()):
            self._before = {}
            return self._moves()
        if self._since_sample < self.quiet_seconds / NUM_SAMPLES:
            return None
        seconds, self._since_sample = self._since_sample, 0.0
        before, self._before = self._before, self._activity()
        if not self._is_still(before, seconds):
            return self._moves()
        self._quiet += seconds
        if not self.hangs and self._asked_since is None:
            half_way = self._stood is None and self._quiet >= self._limit / 2
            if half_way or self._quiet >= self._limit:
                self._calls.ask()
                self._asked_since = 0.0
        return None

    def _is_still(self, before: Mapping[int, Activity], seconds: float) -> bool:
        if not self._before or self._before.keys() != before.keys():
            return False
        return all(
            now.cpu_seconds - before[rank].cpu_seconds <= CPU_SHARE * seconds
            and now.file_bytes - before[rank].file_bytes < FILE_BYTES
            and now.printed_bytes == before[rank].printed_bytes
            for rank, now in self._before.items()
        )

    def _moves(self) -> str | None:
        self._quiet, self._stood, self._asked_since, self._limit = 0.0, None, None, self.quiet_seconds
        if not self.hangs:
            return None
        self.hangs = False
        return "it goes on"

    def _take(self, answers: Mapping[int, str]) -> str | None:
        stood, self._stood = self._stood, answers
        if stood is None:
            return None
        if any(a == NO_ANSWER or _place(stood.get(rank, "")) != _place(a) for rank, a in answers.items()):
            return self._moves()
        if any(map(busy_with, answers.values())) and self._limit == self.quiet_seconds:
            self._limit = BUSY_FACTOR * self.quiet_seconds
            return None
        self.hangs = True
        still = f"nothing moves for {self._quiet:.0f} s"
        self._calls.write_into_logs(still, answers)
        for rank, activity in self._before.items():  # Our own words in its log are no sign of life.
            self._before[rank] = activity._replace(printed_bytes=self._printed(rank))
        return (
            f"{still}: no metrics, no output, next to no CPU time, and the same place in the code"
            f"{places(answers)}. The Python stack of each rank is in its log"
        )

    def _activity(self) -> dict[int, Activity]:
        found = {}
        for rank in range(self._calls.world_size):
            pid = self._calls.living(rank)
            if pid is not None:
                found[rank] = Activity(_cpu_seconds(pid), _file_bytes(pid), self._printed(rank))
        return found

    def _printed(self, rank: int) -> int:
        return size_of(self.folder.log(rank))


def _place(answer: str) -> Sequence[object]:
    return main_thread(answer) or answer


def _cpu_seconds(pid: int) -> float:
    import psutil

    try:
        process = psutil.Process(pid)
        each = (process, *process.children(recursive=True))
        return sum(sum(process.cpu_times()[:4]) for process in each)
    except psutil.Error:  # One of them ended meanwhile: that is a sign of life, of which the next look tells.
        return 0.0


def _file_bytes(pid: int) -> int:
    """By read and write calls, from caches too; 0 where the system does not tell (proc(5), /proc/pid/io)."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar:", "wchar:")))
