"""Numbers as people read them: GiB and KiB with three significant digits, counts with separators."""

from __future__ import annotations


def gib(num_bytes: float) -> str:
    """``num_bytes`` in GiB without the unit: three significant digits, at most two decimals."""
    value = num_bytes / 2**30
    if value >= 99.95:
        return f"{value:,.0f}"
    if value >= 9.995:
        return f"{value:.1f}"
    if value >= 0.095 or value == 0:
        return f"{value:.2f}"
    return f"{value:.2g}"


def kib(num_bytes: float) -> str:
    """``num_bytes`` in KiB without the unit, one decimal."""
    return f"{num_bytes / 2**10:,.1f}"


def count(number: float, noun: str) -> str:
    """``3 layers``, ``1 layer``, ``4,096 tokens``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
