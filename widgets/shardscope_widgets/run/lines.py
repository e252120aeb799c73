"""The points of one line, thinned as they become many, without losing what stands out."""

from __future__ import annotations

from math import isfinite

import numpy as np
from numpy.typing import NDArray

MAX_POINTS = 400
"""Points of a line; a longer one is thinned to about half of them. A panel is 250 pixels wide."""
FIRST_STEPS = 3
"""A run's first steps allocate what later ones reuse: they are no measure of an axis."""
SHARE = 0.98
"""Of the other points an axis shows so many; what is still higher leaves it at the top."""


class Line:
    """One rank's values of one metric."""

    def __init__(self) -> None:
        self.x: list[float] = []
        self.y: list[float] = []

    def add(self, x: float, y: float) -> None:
        """One point more; odd numbers stay as gaps."""
        self.x.append(x)
        self.y.append(y if isfinite(y) else float("nan"))
        if len(self.x) > MAX_POINTS:
            self.x, self.y = thinned(self.x, self.y)

    def arrays(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Its points as plotly sends them quickly: seven digits, whole steps up to ten million among them."""
        with np.errstate(over="ignore"):
            return np.array(self.x, dtype=np.float32), np.array(self.y, dtype=np.float32)

    def top(self) -> float:
        """The highest value; 0 without points."""
        return float(np.nanmax([0.0, *self.y]))

    def usual_top(self) -> float:
        """The highest value but for a few that stand far out; 0 without points."""
        values = np.array(self.y[FIRST_STEPS:] if len(self.y) > 2 * FIRST_STEPS else self.y)
        values = values[np.isfinite(values)]
        return float(np.quantile(values, SHARE)) if values.size else 0.0


def thinned(x: list[float], y: list[float]) -> tuple[list[float], list[float]]:
    """About half of the points: both ends, and of every four between the lowest and the highest.

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
