"""The median of many ratios, and how far it can be trusted."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Literal

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Of ratios that were measured in pairs."""

    median: float
    low: float
    high: float
    """Between the two the median of ever more pairs would lie, with a probability of 95 %. Of fewer than six
    pairs nothing like it can be said: there they are the least and the greatest ratio."""
    number: int

    def against(self, least: float) -> Literal["ok", "UNDER", "unsure"]:
        """Whether the median is at least ``least``; "unsure" where as much is within the noise."""
        if self.median >= least:
            return "ok"
        return "UNDER" if self.high < least else "unsure"


def compute_spread(ratios: Iterable[float]) -> Spread:
    """Compute the spread. Raises ``statistics.StatisticsError`` without ratios."""
    found = sorted(ratios)
    left_out = _left_out(len(found))
    return Spread(
        median=median(found),
        low=found[left_out],
        high=found[-1 - left_out],
        number=len(found),
    )


def _left_out(number: int) -> int:
    """How many of the sorted ratios lie outside of the interval at each end (David and Nagaraja, Order
    Statistics, 2003, section 7.1): however they are distributed, each is as likely above the true median as
    below, so the interval from the r-th to the (n+1-r)-th has it but for twice P(Binomial(n, 1/2) < r)."""
    missed, left_out = 0.0, 0
    for below in range(number // 2):
        missed += 2 * math.comb(number, below) / 2**number
        if missed > 1 - CONFIDENCE:
            break
        left_out = below
    return left_out
