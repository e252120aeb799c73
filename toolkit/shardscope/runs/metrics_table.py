"""All that ranks logged as one table, and that as a CSV file in the run folder."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardscope.runs.folder import RunFolder
from shardscope.runs.records import LineTail, finite_or_special

FIRST = ("step", "rank", "time")
PIECE_BYTES = 2**22
"""Read at a time."""


def csv_in_pieces(folder: RunFolder, world_size: int) -> Iterator[None]:
    """Write ``metrics.csv``: a line per logged line, a column per name; no file if nothing was logged.

    Read twice, in pieces after each of which it yields: a long run of many ranks needs no more memory than a
    short one, and whoever writes it has time for something else. Raises ``OSError``.
    """
    names: dict[str, None] = {}
    for records in _pieces(folder, world_size):
        for record in records:
            names.update(dict.fromkeys(record))
        yield
    if not names:
        return
    columns = [*FIRST, *(name for name in names if name not in FIRST)]
    partial = folder.csv.with_name(f".{folder.csv.name}.{os.getpid()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow(columns)
        for records in _pieces(folder, world_size):
            lines.writerows([_cell(record.get(name)) for name in columns] for record in records)
            yield
    partial.replace(folder.csv)


def curve(records: Sequence[Mapping[str, Any]], name: str) -> dict[int, float]:
    """``name`` by step: the mean over the ranks that logged it as a number."""
    found: dict[int, list[float]] = {}
    for record in records:
        value, step = record.get(name), record.get("step")
        if isinstance(step, int) and isinstance(value, int | float) and not isinstance(value, bool):
            found.setdefault(step, []).append(float(value))
    return {step: sum(values) / len(values) for step, values in sorted(found.items())}


def _pieces(folder: RunFolder, world_size: int) -> Iterator[list[dict[str, Any]]]:
    for rank in range(world_size):
        tail = LineTail(folder.events(rank))
        size = folder.events(rank).stat().st_size if folder.events(rank).exists() else 0
        for end in (*range(PIECE_BYTES, size, PIECE_BYTES), size):
            yield tail.read(end)


def _cell(value: Any) -> Any:
    """Spreadsheets run a cell that begins with one of ``=+-@``; a number may."""
    value = finite_or_special(value)
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t") else value
