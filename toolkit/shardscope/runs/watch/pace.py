"""How fast a run goes, how long it still takes, and which rank is the slowest; from what ranks log."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple, TypeGuard

RECENT_STEPS = 20
"""Logged steps of each rank that count: a run may change its speed."""
EVEN = 0.02
"""Ranks whose steps differ by less than this share keep pace: they wait for each other in every step."""
BEHIND_STEPS = 3
"""A rank whose next step is missing for so many steps' time is behind the others."""
MIN_BEHIND_SECONDS = 2.0


class Slowest(NamedTuple):
    """The rank that holds the others up most, as far as metrics tell."""

    rank: int
    seconds: float
    """Its median step."""
    excess: float
    """How much longer that is than the median of the others: 0.12 is 12 %."""
    num_ranks: int
    steps_behind: int = 0
    """Steps that others have logged and this rank has not, for longer than their ranks' files differ."""

    @property
    def is_even(self) -> bool:
        """Whether no rank is really slower than the others."""
        return self.excess < EVEN and not self.steps_behind


class Pace:
    """Fed with records in any order of ranks; remembers the last steps of each rank, and no more."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}
        self._logged: dict[int, deque[tuple[int, float]]] = {}

    def add(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Take new records; odd ones are left out."""
        for record in records:
            step, rank, when = record.get("step"), record.get("rank"), record.get("time")
            if not _is_whole(step) or not _is_whole(rank) or not _is_finite(when):
                continue
            logged = self._logged.setdefault(rank, deque(maxlen=RECENT_STEPS + 1))
            if not logged or step > logged[-1][0]:
                logged.append((step, float(when)))
            seconds = record.get("step_seconds")
            if _is_finite(seconds) and seconds > 0:
                self._seconds.setdefault(rank, deque(maxlen=RECENT_STEPS)).append(float(seconds))

    @property
    def last_step(self) -> int | None:
        """The number of the last step that any rank logged."""
        return max((logged[-1][0] for logged in self._logged.values()), default=None)

    @property
    def seconds_per_step(self) -> float | None:
        """From one step to the next by the clock: with the data, checkpoints and whatever else is between."""
        if not self._logged:
            return None
        logged = max(self._logged.values(), key=len)
        pairs = pairwise(logged)
        between = [(after - before) / (later - earlier) for (earlier, before), (later, after) in pairs]
        return max(0.0, median(between)) if between else None

    def seconds_left(self, num_steps: int, now: float) -> float | None:
        """Until ``num_steps`` steps are done, ``now`` in seconds since the epoch; None if unknown."""
        pace, last = self.seconds_per_step, self.last_step
        if pace is None or last is None:
            return None
        latest = max(logged[-1][1] for logged in self._logged.values())
        # What the step under way has taken already; one that hangs takes no more than it usually does.
        under_way = min(max(0.0, now - latest), pace)
        return max(0.0, (num_steps - 1 - last) * pace - under_way)

    @property
    def slowest(self) -> Slowest | None:
        """None until two ranks have logged how long their steps took."""
        typical = {rank: median(seconds) for rank, seconds in self._seconds.items()}
        if len(typical) < 2:
            return None
        behind = self._furthest_behind()
        rank = behind[0] if behind else max(typical, key=lambda each: typical[each])
        others = median(seconds for each, seconds in typical.items() if each != rank)
        taken = typical.get(rank, others)
        return Slowest(
            rank=rank,
            seconds=taken,
            excess=max(0.0, taken / others - 1),
            num_ranks=len(typical),
            steps_behind=behind[1] if behind else 0,
        )

    def _furthest_behind(self) -> tuple[int, int] | None:
        pace = self.seconds_per_step
        if pace is None:
            return None
        last = {rank: logged[-1] for rank, logged in self._logged.items()}
        newest_step, newest = max(last.values())
        rank = min(last, key=lambda each: last[each])
        step, when = last[rank]
        # A rank may log every tenth step only.
        steps = [number for number, _ in self._logged[rank]]
        usual = median(after - before for before, after in pairwise(steps)) if len(steps) > 1 else 1
        late = BEHIND_STEPS * usual
        missing = newest - when > max(MIN_BEHIND_SECONDS, late * pace)
        return (rank, newest_step - step) if missing and newest_step - step >= late else None


def _is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
