"""``Exercise``: what one exercise of the course asks, expects, hints and explains."""

from __future__ import annotations

from dataclasses import dataclass

from shardscope.teach.answers import Expected

GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """One exercise, checked by :func:`shardscope.teach.check`."""

    name: str
    """Name in kebab-case, which begins with the notebook's number: ``01-bytes-per-parameter``."""
    asks: str
    """What the answer is, in a few words: shown while there is none."""
    expected: Expected
    hints: tuple[str, ...]
    """Hints that say more and more; the last almost gives the answer away."""
    why: str
    """Explanation of the right answer, with its formula and source."""
