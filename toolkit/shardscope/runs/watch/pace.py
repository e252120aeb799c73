"""Seconds per step, remaining time and slowest rank of a run, computed from its logged metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

from shardscope.records.json_values import is_int, is_number

RECENT_STEPS = 20
"""Number of latest steps per rank that are used: the speed of a run may change."""
EVEN_EXCESS = 0.02
"""Relative difference of step times below which ranks count as equally fast."""
LONGEST_PAUSE = 10
"""A longer time between two steps counts as this multiple of the median."""
RATES = ("tokens_per_second_all_ranks", "tokens_per_second")
"""Metrics with tokens per second. A user's function may log the rate of its own rank only."""
BEHIND_STEPS = 3
"""Number of step times without a new step after which a rank counts as behind the others."""
MIN_BEHIND_SECONDS = 2.0


class SlowestRank(NamedTuple):
    """The slowest rank, by the logged metrics."""

    rank: int
    seconds: float
    """Median seconds per step of the rank."""
    excess: float
    """Relative excess over the median of the other ranks: 0.12 is 12 %."""
    num_ranks: int
    steps_behind: int = 0
    """Number of steps that other ranks have logged and this one has not; 0 if it is not late."""

    @property
    def is_even(self) -> bool:
        """Return whether all ranks are equally fast, within ``EVEN_EXCESS``."""
        return self.excess < EVEN_EXCESS and not self.steps_behind


class SlowestNode(NamedTuple):
    """The node whose ranks have the longest median step."""

    number: int
    excess: float
    """Relative excess over the median of the other nodes: 0.12 is 12 %."""


class Pace:
    """Speed of a run, from records in any order of ranks; keeps only the latest steps of each rank."""

    def __init__(self) -> None:
        self._seconds: dict[int, dict[int, float]] = {}
        """Seconds of the latest steps by rank and step."""
        self._logged: dict[int, deque[tuple[int, float]]] = {}
        self._rates: dict[str, deque[float]] = {name: deque(maxlen=RECENT_STEPS) for name in RATES}
        self.seconds_ahead: Mapping[int, float] = {}
        """Seconds by which ranks' clocks are ahead of rank 0's, where they differ (several nodes)."""

    def add(self, records: Iterable[Mapping[str, object]]) -> None:
        """Add new records; malformed ones are skipped."""
        for record in records:
            step, rank, when = record.get("step"), record.get("rank"), record.get("time")
            if not is_int(step) or not is_int(rank) or not is_number(when):
                continue
            logged = self._logged.setdefault(rank, deque(maxlen=RECENT_STEPS + 1))
            if not logged or step > logged[-1][0]:
                logged.append((step, float(when)))
            seconds = record.get("step_seconds")
            if is_number(seconds) and seconds > 0:
                steps = self._seconds.setdefault(rank, {})
                steps[step] = float(seconds)
                if len(steps) > RECENT_STEPS:
                    del steps[min(steps)]
            for name, rates in self._rates.items():
                if rank == 0 and is_number(rate := record.get(name)):
                    rates.append(float(rate))

    @property
    def last_step(self) -> int | None:
        """Number of the last step logged by any rank."""
        return max((logged[-1][0] for logged in self._logged.values()), default=None)

    @property
    def seconds_per_step(self) -> float | None:
        """Mean wall-clock seconds from one step to the next: data loading, validation and checkpoints too."""
        if not self._logged:
            return None
        # Any rank will do, because steps are synchronous; the longest history is the most precise.
        logged = max(self._logged.values(), key=len)
        pairs = list(pairwise(logged))
        between = [(after - before) / (later - earlier) for (earlier, before), (later, after) in pairs]
        if not between:
            return None
        # Validation and checkpoints come again; the pause until a failed run is started again does not.
        longest = LONGEST_PAUSE * median(between)
        return max(0.0, fmean(min(seconds, longest) for seconds in between))

    @property
    def tokens_per_second(self) -> tuple[str, float] | None:
        """The metric of rank 0 with the rate of all ranks, else that of its own, and the median of the latest
        steps."""
        for name, rates in self._rates.items():
            if rates:
                return name, median(rates)
        return None

    def seconds_left(self, num_steps: int, now: float) -> float | None:
        """Return the seconds until ``num_steps`` steps are done, at epoch time ``now``; None if unknown."""
        pace, last = self.seconds_per_step, self.last_step
        if pace is None or last is None:
            return None
        latest = max(logged[-1][1] for logged in self._logged.values())
        # Time spent in the current step, capped at one step: a hang must not reduce the remaining time.
        under_way = min(max(0.0, now - latest), pace)
        return max(0.0, (num_steps - 1 - last) * pace - under_way)

    @property
    def slowest(self) -> SlowestRank | None:
        """The slowest rank; None until two ranks have logged step times."""
        if len(self._seconds) < 2:
            return None
        excess = self._compare_ranks()
        # A rank that has stopped logging is slower than any other, whatever its earlier steps took.
        behind = self._furthest_behind()
        rank = behind[0] if behind else max(excess, key=lambda number: excess[number])
        everyone = (seconds for steps in self._seconds.values() for seconds in steps.values())
        return SlowestRank(
            rank=rank,
            seconds=median(self._seconds[rank].values() if rank in self._seconds else everyone),
            excess=max(0.0, excess.get(rank, 0.0)),
            num_ranks=len(self._seconds),
            steps_behind=behind[1] if behind else 0,
        )

    def _compare_ranks(self) -> dict[int, float]:
        """Return the median excess of each rank's steps over the same steps of the others; 0 without any.

        Step by step, because of steps of two lengths the medians of two equal ranks may be one of each.
        """
        by_step: dict[int, list[float]] = {}
        for steps in self._seconds.values():
            for step, seconds in steps.items():
                by_step.setdefault(step, []).append(seconds)
        for ordered in by_step.values():
            ordered.sort()
        return {
            rank: median(
                [
                    seconds / _find_median_without(by_step[step], seconds) - 1
                    for step, seconds in steps.items()
                    if len(by_step[step]) > 1
                ]
                or [0.0]
            )
            for rank, steps in self._seconds.items()
        }

    def find_slowest_node(self, node_of_rank: Mapping[int, int]) -> SlowestNode | None:
        """Return the slowest node; None until ranks of two nodes have logged step times."""
        seconds: dict[int, list[float]] = {}
        for rank, rank_seconds in self._seconds.items():
            if rank in node_of_rank:
                seconds.setdefault(node_of_rank[rank], []).append(median(rank_seconds.values()))
        medians = {number: median(values) for number, values in seconds.items()}
        if len(medians) < 2:
            return None
        slowest = max(medians, key=lambda number: medians[number])
        median_of_others = median(value for number, value in medians.items() if number != slowest)
        return SlowestNode(slowest, max(0.0, medians[slowest] / median_of_others - 1))

    def _furthest_behind(self) -> tuple[int, int] | None:
        pace = self.seconds_per_step
        if pace is None:
            return None
        last = {
            rank: (logged[-1][0], logged[-1][1] - self.seconds_ahead.get(rank, 0.0))
            for rank, logged in self._logged.items()
        }
        newest_step, newest = max(last.values())
        rank = min(last, key=lambda number: last[number])
        step, when = last[rank]
        # A task may log only every tenth step: measure lateness in logging intervals.
        steps = [number for number, _ in self._logged[rank]]
        interval = median(after - before for before, after in pairwise(steps)) if len(steps) > 1 else 1
        max_steps = BEHIND_STEPS * interval
        # In time as well as in steps: of steps that take milliseconds, some rank always lacks a few.
        is_late = newest - when > max(MIN_BEHIND_SECONDS, max_steps * pace)
        return (rank, newest_step - step) if is_late and newest_step - step >= max_steps else None


def _find_median_without(ordered: Sequence[float], value: float) -> float:
    """Return the median of ``ordered`` without one ``value``, which it contains."""
    # By index, because there may be thousands of ranks.
    position, num_others = bisect_left(ordered, value), len(ordered) - 1
    middle = ((num_others - 1) // 2, num_others // 2)
    return fmean(ordered[index if index < position else index + 1] for index in middle)
