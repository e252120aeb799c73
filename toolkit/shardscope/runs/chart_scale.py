"""Axes of a chart: which values they reach, where their ticks are, and what these are called."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

ABOUT_TICKS = 5
LOG_FROM_RATIO = 1000.0
"""A run that diverges would else press every other curve flat onto the axis."""
PADDING = 0.06
"""Of the height, above and below what is drawn."""
ALIKE = 1e-6
"""Values that differ by less than this share of themselves are one height, not noise to look into."""
NOTHING = 1e-100
"""What is smaller is a zero to whoever looks; a tenth of it may not even be a float."""
_SUFFIXES = ((1e12, " T"), (1e9, " G"), (1e6, " M"))


@dataclass(frozen=True, kw_only=True)
class Scale:
    """An axis from ``low`` to ``high``, with a word for each tick."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    is_log: bool = False

    def share(self, value: float) -> float:
        """Where ``value`` lies: 0 at ``low``, 1 at ``high``."""
        low, high, value = (math.log10(x) if self.is_log else x for x in (self.low, self.high, value))
        return (value - low) / (high - low)


def of_steps(steps: Collection[int]) -> Scale:
    """For training steps: whole numbers, from the first to the last that any run logged."""
    low, high = min(steps), max(steps)
    if low == high:
        return Scale(low=low - 1, high=high + 1, ticks=((low, f"{low:,}"),))
    return Scale(low=low, high=high, ticks=_linear_ticks(low, high, max(1.0, _nice((high - low) / 6))))


def of_values(values: Collection[float], *, from_zero: bool = False) -> Scale:
    """For what was logged; logarithmic where it spans more than a factor of a thousand."""
    low, high = min(values), max(values)
    if not from_zero and low > NOTHING and high / low > LOG_FROM_RATIO:
        return _logarithmic(low, high)
    if from_zero:
        low = min(0.0, low)
    largest = max(abs(low), abs(high))
    if high - low <= max(ALIKE * largest, NOTHING):
        room = largest / 10 if largest > NOTHING else 1.0
        low, high = low - room, high + room
    room = PADDING * (high - low)
    low, high = low if from_zero and low == 0 else low - room, high + room
    return Scale(low=low, high=high, ticks=_linear_ticks(low, high, _nice((high - low) / ABOUT_TICKS)))


def _logarithmic(low: float, high: float) -> Scale:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = math.ceil((last - first) / ABOUT_TICKS)
    ticks = tuple(
        (10.0**power, f"{10.0**power:,g}" if -4 < power < 6 else f"1e{power}")
        for power in range(first, last + 1, every)
    )
    return Scale(low=10.0**first, high=10.0**last, ticks=ticks, is_log=True)


def _nice(step: float) -> float:
    """The next of 1, 2, 5, 10, 20, ... that is not below ``step``."""
    power: float = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9))


def _linear_ticks(low: float, high: float, step: float) -> tuple[tuple[float, str], ...]:
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    largest = max(abs(low), abs(high))
    return tuple((k * step, _word(k * step, step, largest)) for k in range(first, last + 1))


def _word(value: float, step: float, largest: float) -> str:
    if largest < 1e-3 or largest >= 1e15:
        return f"{value:g}".replace("-", "−")
    unit, suffix = next(((unit, suffix) for unit, suffix in _SUFFIXES if largest >= unit), (1.0, ""))
    decimals = max(0, -math.floor(math.log10(step / unit) + 1e-9))
    return f"{value / unit:,.{decimals}f}{suffix if value else ''}".replace("-", "−")
