"""The points of one line, thinned when there are many, with its outliers kept."""

from __future__ import annotations

from math import isfinite

import numpy as np
from numpy.typing import NDArray

MAX_POINTS = 400
"""Points of a line; a longer one is thinned to about half of them. A panel is 250 pixels wide."""
FIRST_STEPS = 3
"""Steps that an axis ignores: the first ones allocate what later ones reuse, and are slower."""
SHARE = 0.98
"""Share of the other points that are within the axis; higher ones are drawn at its top."""


class Line:
    """One rank's values of one metric."""

    def __init__(self) -> None:
        self.x: list[float] = []
        self.y: list[float] = []

    def add(self, x: float, y: float) -> None:
        """Add a point; NaN and infinities become gaps."""
        self.x.append(x)
        self.y.append(y if isfinite(y) else float("nan"))
        if len(self.x) > MAX_POINTS:
            self.x, self.y = thinned(self.x, self.y)

    def arrays(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return x and y as float32: exact for whole steps up to ten million, and half the size to send."""
        with np.errstate(over="ignore"):
            return np.array(self.x, dtype=np.float32), np.array(self.y, dtype=np.float32)

    def top(self) -> float:
        """Return the highest value; 0 without points."""
        return float(np.nanmax([0.0, *self.y]))

    def usual_top(self) -> float:
        """Return the highest value without outliers; 0 without points."""
        values = np.array(self.y[FIRST_STEPS:] if len(self.y) > 2 * FIRST_STEPS else self.y)
        values = values[np.isfinite(values)]
        return float(np.quantile(values, SHARE)) if values.size else 0.0


def thinned(x: list[float], y: list[float]) -> tuple[list[float], list[float]]:
    """Return about half of the points: both ends, and the lowest and highest of every four between.

    A spike of one step stays, however long the run; every second point would lose half of them.
    """
    kept = [0]
    for start in range(1, len(x) - 1, 4):
        four = range(start, min(start + 4, len(x) - 1))
        known = [index for index in four if y[index] == y[index]]
        if not known:
            kept.append(start)
            continue
        kept += sorted({min(known, key=lambda index: y[index]), max(known, key=lambda index: y[index])})
    kept.append(len(x) - 1)
    return [x[index] for index in kept], [y[index] for index in kept]
