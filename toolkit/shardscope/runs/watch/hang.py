"""A hang, found from outside: no step within many times the median step time, and nothing that explains it.

Only what ranks logged tells of their steps; ``standstill.py`` looks at tasks that log none.
Start-up and the first steps, which compile and allocate, are not judged: there is no median yet. Before
anything is said, each rank is asked for its Python stacks; one that is at a checkpoint, compiles or writes a
trace gets more time.
"""

from __future__ import annotations

import os
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardscope.records.files import read_json
from shardscope.records.folder import RunFolder
from shardscope.runs.watch.stack_calls import ANSWER_SECONDS, TOLD_RANKS, StackCalls, places
from shardscope.runs.watch.stacks import busy_with

MEDIANS = 20.0
"""A step that takes so many times the median is looked at."""
LEAST_SECONDS = 60.0
"""But not before: a slow disk, a data loader or another process on the machine may well cost seconds."""
BUSY_FACTOR = 10.0
"""How much longer a rank may take that its stack explains."""
MIN_STEPS = 5
"""Times between steps that a median needs."""
MAX_GAP_SECONDS = 5.0
"""Between two looks no more is counted: whatever stopped the supervisor has stopped the ranks as well."""


@dataclass
class Progress:
    """What one rank's steps show."""

    step: int = -1
    time: float | None = None
    """When it logged that step, by its own clock."""
    still_seconds: float = 0.0
    """Since the supervisor saw it come."""
    took: deque[float] = field(default_factory=lambda: deque(maxlen=64))
    """Seconds between its latest steps."""

    def see(self, records: Sequence[Mapping[str, Any]]) -> bool:
        """Take in what the rank logged; whether it lives: a line of the same step shows that as well."""
        for record in records:
            step, time = record.get("step"), record.get("time")
            if not isinstance(step, int) or not isinstance(time, int | float) or step == self.step:
                continue
            # Not "<": a task may count anew in each epoch.
            if self.time is not None and time >= self.time:
                self.took.append(time - self.time)
            self.step, self.time = step, float(time)
        if records:
            self.still_seconds = 0.0
        return bool(records)

    @property
    def median_seconds(self) -> float | None:
        """None as long as too few steps are known."""
        return statistics.median(self.took) if len(self.took) >= MIN_STEPS else None


class HangWatch:
    """One run's. ``look`` once a second with what ranks logged since; it returns what there is to say."""

    def __init__(self, folder: RunFolder, world_size: int, *, least_seconds: float | None = None) -> None:
        self.folder = folder
        self.least_seconds = default_least_seconds() if least_seconds is None else least_seconds
        self.ranks = {rank: Progress() for rank in range(world_size)}
        self.hangs = False
        """Whether the run is said to hang, and no step has come since."""
        self._asked_since: float | None = None
        self._ask_again_after = 0.0
        self._calls = StackCalls(folder, world_size)

    def look(self, new: Mapping[int, Sequence[Mapping[str, Any]]], seconds: float) -> str | None:
        """``new``: records by rank; ``seconds``: since the last look. What changed, in words, or None."""
        moved = {rank for rank, records in new.items() if self.ranks[rank].see(records)}
        for rank, progress in self.ranks.items():
            if rank not in moved:
                progress.still_seconds += min(seconds, MAX_GAP_SECONDS)
        still = {rank: self.ranks[rank] for rank in self.ranks if self._is_still(rank)}
        if not still:
            return self._goes_on()
        waited = max(progress.still_seconds for progress in still.values())
        if self.hangs or waited < self._ask_again_after:
            return None
        if self._asked_since is None:
            self._calls.ask()
            self._asked_since = 0.0
            return None
        self._asked_since += seconds
        if self._asked_since < ANSWER_SECONDS:
            return None
        self._asked_since = None
        return self._judge(still, waited)

    @property
    def has_steps(self) -> bool:
        """Whether enough steps are known to judge by."""
        return any(progress.median_seconds is not None for progress in self.ranks.values())

    def _is_still(self, rank: int) -> bool:
        progress = self.ranks[rank]
        median = progress.median_seconds
        if median is None or progress.still_seconds <= max(self.least_seconds, MEDIANS * median):
            return False
        return "exit" not in (read_json(self.folder.rank(rank)) or {})

    def _goes_on(self) -> str | None:
        self._ask_again_after, self._asked_since = 0.0, None
        if not self.hangs:
            return None
        self.hangs = False
        return "steps come again"

    def _judge(self, still: Mapping[int, Progress], waited: float) -> str | None:
        answers = self._calls.answers()
        busy = {rank: words for rank, answer in answers.items() if (words := busy_with(answer))}
        limit = max(max(self.least_seconds, MEDIANS * (each.median_seconds or 0)) for each in still.values())
        if busy and waited < BUSY_FACTOR * limit:
            self._ask_again_after = min(2 * waited, BUSY_FACTOR * limit)
            return None
        self.hangs = True
        self._calls.write_into_logs(f"no step for {waited:.0f} s", answers)
        return self._words(still, waited, answers, busy)

    def _words(
        self,
        still: Mapping[int, Progress],
        waited: float,
        answers: Mapping[int, str],
        busy: Mapping[int, str],
    ) -> str:
        median = statistics.median(each.median_seconds or 0.0 for each in still.values())
        steps = {rank: progress.step for rank, progress in self.ranks.items() if progress.step >= 0}
        first = min(steps.values())
        behind = [rank for rank, step in steps.items() if step == first]
        words = f"no step for {waited:.0f} s, where one takes {median:.2g} s"
        if len(behind) < len(steps):
            words += f"; {_ranks(behind)} came no further than step {first}, others to {max(steps.values())}"
        if busy:
            words += (
                f"; {', '.join(f'rank {rank} is {what}' for rank, what in list(busy.items())[:TOLD_RANKS])}"
            )
        return f"{words}{places(answers, behind)}. The Python stack of each rank is in its log"


def _ranks(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:TOLD_RANKS]))
    return f"rank{'s' * (len(numbers) > 1)} {shown}{' and more' * (len(numbers) > TOLD_RANKS)}"


def default_least_seconds() -> float:
    """``SHARDSCOPE_HANG_SECONDS``, for tasks that rightly pause longer between two lines of metrics."""
    try:
        return max(0.1, float(os.environ["SHARDSCOPE_HANG_SECONDS"]))
    except (KeyError, ValueError):
        return LEAST_SECONDS
