"""Formatting of rates, prices and durations: three significant digits and one unit."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

from shardscope.core.errors import Value, check_number, refuse

LARGE = (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3))
MAX_TOKENS = 1e18
BUDGET = re.compile(r"([0-9.]+(?:e[+-]?[0-9]+)?)\s*([kmbt]?)(?:\s*tokens?)?", re.IGNORECASE)


_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:[GMT]iB|GB|[mµ]?s|%)(?![\w/]))")


def keep_units(text: str) -> str:
    """Return ``text`` with no-break spaces between numbers and units: ``0.0017 GiB`` never wraps."""
    return _BEFORE_UNIT.sub("\N{NO-BREAK SPACE}", text)


def format_three_digits(value: float) -> str:
    """Format a number with three significant digits: ``412``, ``41.2``, ``4.12``, ``0.41``, ``0.0041``."""
    for least, digits in ((99.95, 0), (9.995, 1), (0.995, 2)):
        if value >= least:
            return f"{value:,.{digits}f}"
    if not value:
        return "0"
    if 1e-7 < value < 1e-4:  # Python writes 3.9e-05.
        return f"{value:.{1 - math.floor(math.log10(value))}f}"
    return f"{value:.2g}"


def format_short(value: float) -> str:
    """Format a number with a magnitude suffix: ``7.94k``, ``1.2M``, ``412``."""
    for letter, size in LARGE:
        if value >= 0.9995 * size:
            return format_three_digits(value / size) + letter
    return format_three_digits(value)


def format_dollars(value: float) -> str:
    """Format a price: ``$0.094``, ``$1.23``, ``$412``, ``$1.20M``."""
    if value >= 0.995 or not value:
        return f"${format_short(value)}" if value >= 999_500 else f"${format_three_digits(value)}"
    # Two significant digits and at least two decimals, for the cents.
    rounded = float(f"{value:.1e}")
    return f"${rounded:.{max(2, 1 - math.floor(math.log10(rounded)))}f}"


def format_duration(days: float) -> str:
    """Format a duration: ``41.2 minutes``, ``7.94 hours``, ``41.2 days``, ``4.12 years``."""
    for unit, size in (("years", 365.0), ("days", 1.0), ("hours", 1 / 24)):
        if days >= 2 * size:
            return f"{format_three_digits(days / size)} {unit}"
    return f"{format_three_digits(days * 24 * 60)} minutes"


def parse_tokens(text: str) -> float:
    """Parse a number of tokens as typed by the user: ``15T``, ``300B``, ``1.5e12``. Raises ``ValueError``."""
    cleaned = text.strip().replace(",", "").replace("_", "")
    match = BUDGET.fullmatch(cleaned)
    try:
        number = float(match[1]) if match else None
    except ValueError:  # "1.2.3"
        number = None
    if match is None or number is None:
        refuse("num_tokens", text, "a number of tokens, such as 15T, 300B or 1.5e12", Value("15T"))
    # Users type K for thousands too; of the suffixes only k is lower case.
    factor = dict(LARGE).get("k" if match[2] in "kK" else match[2].upper(), 1.0) if match[2] else 1.0
    return check_number("num_tokens", number * factor, low=1, high=MAX_TOKENS)


class Unit(NamedTuple):
    """The unit of memory sizes: GiB, or a smaller one for the tiny models of rehearsals."""

    name: str
    num_bytes: int

    @classmethod
    def for_bytes(cls, num_bytes: float) -> Unit:
        """Return the unit that suits ``num_bytes``."""
        return cls("MiB", 2**20) if 0 < num_bytes < 2**28 else cls("GiB", 2**30)

    @classmethod
    def for_column(cls, column: Iterable[float]) -> Unit:
        """Return the unit in which each of these sizes still shows a digit: that of the smallest."""
        smallest = min((num_bytes for num_bytes in column if num_bytes > 0), default=0.0)
        for name, size in (("GiB", 2**30), ("MiB", 2**20)):
            if smallest >= 0.095 * size:
                return cls(name, size)
        return cls("KiB", 2**10)

    def format(self, num_bytes: float) -> str:
        """Format ``num_bytes`` in this unit with two decimals."""
        return f"{num_bytes / self.num_bytes:,.2f}"


def format_size(num_bytes: float) -> str:
    """Format bytes with three digits in the unit that suits them: ``416 MiB``, ``1.63 GiB``."""
    if not num_bytes:
        return "nothing"
    name, size = ("MiB", 2**20) if num_bytes < 0.995 * 2**30 else ("GiB", 2**30)
    if num_bytes < 2**20:
        name, size = "KiB", 2**10
    return f"{format_three_digits(num_bytes / size)}\N{NO-BREAK SPACE}{name}"
