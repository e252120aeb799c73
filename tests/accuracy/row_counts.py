"""Tables of how many rows of each source share a text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

ASSUMPTIONS = "Assumptions for options that rows do not state"
"""Heading of the table of assumptions, in both parts of the report."""


def counted_table(heading: str, column: str, pairs: Iterable[tuple[str, str]]) -> str:
    """Format pairs of a source and a text, the most frequent first; empty if there are none."""
    counted = Counter(pairs)
    if not counted:
        return ""
    lines = [f"## {heading}", "", f"| rows | source | {column} |", "|---|---|---|"]
    for (name, text), count in sorted(counted.items(), key=lambda item: (-item[1], item[0])):
        lines.append(f"| {count} | {name} | {text} |")
    return "\n".join(lines)
