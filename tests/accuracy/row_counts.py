"""A table of how many rows of each source share some words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


def counted_table(heading: str, what: str, pairs: Iterable[tuple[str, str]]) -> str:
    """``pairs`` of a source and words, the most frequent first; empty if there are none."""
    counted = Counter(pairs)
    if not counted:
        return ""
    lines = [f"## {heading}", "", f"| rows | source | {what} |", "|---|---|---|"]
    for (name, words), count in sorted(counted.items(), key=lambda item: (-item[1], item[0])):
        lines.append(f"| {count} | {name} | {words} |")
    return "\n".join(lines)
