"""The points of one line, downsampled if there are many, with outliers preserved."""

from __future__ import annotations

from math import isfinite

import numpy as np
from numpy.typing import NDArray

MAX_POINTS = 400
"""Maximum points of a line; a longer one is reduced to about half. A panel is 250 pixels wide."""
FIRST_STEPS = 3
"""Steps ignored by the axis range: the first steps are slower because they allocate memory."""
SHARE = 0.98
"""Fraction of the other points that the axis range covers; higher points are drawn at its top."""


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
