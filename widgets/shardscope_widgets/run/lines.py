"""The points of one line, downsampled if there are many, with outliers preserved."""

from __future__ import annotations

from collections.abc import Collection
from math import isfinite

import numpy as np
from numpy.typing import NDArray

MAX_POINTS = 400
"""Maximum points of a line; a longer one is reduced to about half. A panel is 250 pixels wide."""
MAX_COMPARED = 256
"""Steps by which a rank's records may arrive later than another's and still be compared."""
FIRST_STEPS = 3
"""Steps ignored by the axis range: the first steps are slower because they allocate memory."""
SHARE = 0.98
"""Fraction of the other points that the axis range covers; higher points are drawn at its top."""


class Agreement:
    """Comparison of the values of one metric over all ranks, which are equal for an averaged loss.

    Values are compared at equal steps. A rank that was never compared does not agree: of a long run only a
    sample of the lines is read.
    """

    def __init__(self) -> None:
        self._values: dict[float, tuple[int, float]] = {}
        """Step -> the rank that logged it first, with its value; the latest ``MAX_COMPARED`` steps."""
        self._agreeing: set[int] = set()
        self._differs = False

    def add(self, x: float, rank: int, value: float) -> None:
        """Compare the value of ``rank`` at step ``x`` with that of the rank that logged it first."""
        if self._differs:
            return
        if x not in self._values:
            if len(self._values) >= MAX_COMPARED:
                self._values.pop(next(iter(self._values)))
            self._values[x] = (rank, value)
            return
        first, known = self._values[x]
        if first == rank:  # A run that was started again logs its last steps twice.
            self._values[x] = (rank, value)
        elif value == known or (value != value and known != known):
            self._agreeing |= {first, rank}
        else:
            self._differs = True
            self._values.clear()

    def includes(self, ranks: Collection[int]) -> bool:
        """Return whether these are several ranks, all of which have logged the same."""
        return len(ranks) > 1 and not self._differs and self._agreeing.issuperset(ranks)


class Line:
    """The values of one metric on one rank."""

    def __init__(self) -> None:
        self.x: list[float] = []
        self.y: list[float] = []

    def add_point(self, x: float, y: float) -> None:
        """Add a point; NaN and infinities become gaps."""
        self.x.append(x)
        self.y.append(y if isfinite(y) else float("nan"))
        if len(self.x) > MAX_POINTS:
            self.x, self.y = downsample(self.x, self.y)

    def scale(self, factor: float) -> None:
        """Multiply all values by ``factor``, as for another unit."""
        self.y = [value * factor for value in self.y]

    def to_arrays(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return x and y as float32: exact for whole steps up to ten million, and half the bytes to send."""
        with np.errstate(over="ignore"):
            return np.array(self.x, dtype=np.float32), np.array(self.y, dtype=np.float32)

    def find_top(self) -> float:
        """Return the highest value, or 0 without points."""
        return float(np.nanmax([0.0, *self.y]))

    def find_usual_top(self) -> float:
        """Return the highest value without outliers, or 0 without points."""
        # A short run keeps its first steps: without them there would be too few points.
        values = np.array(self.y[FIRST_STEPS:] if len(self.y) > 2 * FIRST_STEPS else self.y)
        values = values[np.isfinite(values)]
        return float(np.quantile(values, SHARE)) if values.size else 0.0


def downsample(x: list[float], y: list[float]) -> tuple[list[float], list[float]]:
    """Return about half of the points: both ends, and the minimum and maximum of every four between.

    This preserves a spike of one step in a run of any length; taking every second point would lose half
    of the spikes.
    """
    indices = [0]
    # Two of four points are kept, so a line grows to MAX_POINTS again before the next reduction.
    for start in range(1, len(x) - 1, 4):
        four = range(start, min(start + 4, len(x) - 1))
        known = [index for index in four if y[index] == y[index]]
        # A group of gaps keeps one of them, or the line would be drawn across the gap.
        if not known:
            indices.append(start)
            continue
        indices += sorted({min(known, key=lambda index: y[index]), max(known, key=lambda index: y[index])})
    indices.append(len(x) - 1)
    return [x[index] for index in indices], [y[index] for index in indices]
