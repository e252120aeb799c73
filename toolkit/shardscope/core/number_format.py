"""Number formatting: GiB, KiB and times with three significant digits, counts with separators."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Scale(NamedTuple):
    """The common time unit of one report or of one column, so that its numbers line up."""

    unit: str
    factor: float
    decimals: int = 2
    """Most decimals of a number below 1."""

    @classmethod
    def for_seconds(cls, seconds: float) -> Scale:
        """Return the unit that suits a step of ``seconds``."""
        # Seconds from 1 s on, and microseconds below 10 ms. Parts of a step of few seconds have a third
        # decimal, without which their rounded sums would differ from the step. The limits are where rounding
        # adds a digit: 0.9996 s is shown as 1.00 s, not as 1,000 ms.
        for unit, factor, least, decimals in (
            ("s", 1.0, 9.995, 2),
            ("s", 1.0, 0.9995, 3),
            ("ms", 1e3, 0.01, 2),
        ):
            if seconds >= least:
                return cls(unit, factor, decimals)
        return cls("µs", 1e6)

    @classmethod
    def for_column(cls, column: Iterable[float]) -> Scale:
        """Return the unit in which each of these seconds still shows a digit: that of the smallest."""
        smallest = min((seconds for seconds in column if seconds > 0), default=0.0)
        for unit, factor in (("s", 1.0), ("ms", 1e3)):
            if smallest * factor >= 0.095:
                return cls(unit, factor)
        return cls("µs", 1e6)

    def format(self, seconds: float) -> str:
        """Format ``seconds`` without the unit: three significant digits, at most :attr:`decimals` decimals.

        ``<0.01`` for less than these show.
        """
        if not seconds:
            return "0"
        value = seconds * self.factor
        least = 10**-self.decimals
        if abs(value) < least / 2:
            return f"<{least:g}"
        digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2 if value >= 0.9995 else self.decimals
        return f"{value:,.{digits}f}"

    def format_with_unit(self, seconds: float) -> str:
        """Format ``seconds`` with the unit: ``2.30 s``."""
        return f"{self.format(seconds)} {self.unit}"


def format_gib(num_bytes: float) -> str:
    """Return ``num_bytes`` in GiB without the unit: three significant digits, at most two decimals."""
    value = num_bytes / 2**30
    # The limits are where rounding adds a digit: 99.96 is shown as 100, not as 100.0.
    if value >= 99.95:
        return f"{value:,.0f}"
    if value >= 9.995:
        return f"{value:.1f}"
    if value >= 0.095 or value == 0:
        return f"{value:.2f}"
    return f"{value:.2g}"


def format_kib(num_bytes: float) -> str:
    """Return ``num_bytes`` in KiB without the unit, with one decimal."""
    return f"{num_bytes / 2**10:,.1f}"


def format_rate(per_second: float) -> str:
    """Return a rate without its unit: whole from 10 on, with two significant digits below."""
    return f"{per_second:,.0f}" if per_second >= 9.95 else f"{per_second:.2g}"


def format_number(value: float) -> str:
    """Return a number with three significant digits and separators: ``1,130``, ``16.7``, ``2``, ``0.404``."""
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def format_share(share: float) -> str:
    """Return a share in per cent: ``41 %``, or with two significant digits below 1 %."""
    value = 100 * share
    return f"{value:.0f} %" if value >= 0.95 or not value else f"{value:.2g} %"


def format_error(share: float) -> str:
    """Return the relative error of a prediction in per cent: ``+12 %``, ``-3 %``, ``0 %``."""
    text = f"{100 * share:+z.0f} %"
    return "0 %" if text == "+0 %" else text


def format_count(number: float, noun: str) -> str:
    """Return a count with its noun: ``3 layers``, ``1 layer``, ``4,096 tokens``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def format_sum(parts: Iterable[tuple[int, str]]) -> str:
    """Return a sum as text: ``3.74 GiB of weights + 0.41 GiB of staging``.

    Parts of 0 bytes are omitted; a single part is shown without its number.
    """
    nonzero = [(num_bytes, what) for num_bytes, what in parts if num_bytes]
    if len(nonzero) < 2:
        return "".join(what for _, what in nonzero)
    signed = (
        f"{'-' if num_bytes < 0 else '+'} {format_gib(abs(num_bytes))} GiB {what}"
        for num_bytes, what in nonzero
    )
    return " ".join(signed).removeprefix("+ ")


def join_list(parts: Iterable[str], last: str = "and") -> str:
    """Join texts with commas and a final ``last``: ``DDP, FSDP2 and DeepSpeed``."""
    texts = list(parts)
    return ", ".join(texts[:-1]) + f" {last} {texts[-1]}" if len(texts) > 1 else "".join(texts)
