"""Metrics of all ranks: the CSV table in the run folder, and curves by step."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

from shardscope.records.folder import RunFolder
from shardscope.records.json_files import RESERVED, LineTail, finite_or_special, partial_file
from shardscope.records.regular_files import open_new, size_of

PIECE_BYTES = 2**20
"""Bytes of metrics per read."""
MAX_BYTES = 2**30
"""Most bytes of metrics that become a complete table: ten million lines, which take minutes."""
MAX_EXPONENT = 700.0
"""Losses above it have an infinite perplexity: exp(710) is beyond float64."""
FORMULA_STARTS = ("=", "+", "-", "@", "＝", "＋", "－", "＠")


def write_csv_in_pieces(folder: RunFolder, world_size: int, report: Callable[[str], None]) -> Iterator[None]:
    """Write ``metrics.csv`` with a row per logged line and a column per name; no file if nothing was logged.

    For more than :data:`MAX_BYTES` of metrics it has every n-th line of each rank, and ``report`` is called
    with a message about that.

    The metrics are read twice (column names, then rows), in pieces, so that memory does not grow with the
    run. It yields after each piece, so that the caller can do other work in between. Raises ``OSError``.
    """
    # Every n-th line of each rank, so that the sample covers the whole run evenly.
    stride = _compute_stride(folder, world_size)
    if stride > 1:
        report(f"metrics.csv has one of {stride} lines of each rank: all are more than {stride - 1} GiB")
    # First pass: the columns. A dict keeps the order in which names were first logged.
    names: dict[str, None] = {}
    for records in _read_pieces(folder, world_size, stride):
        for record in records:
            names.update(dict.fromkeys(record))
        yield
    if not names:
        return
    # Second pass: the rows, into a partial file that replaces the old one only when it is complete.
    columns = [*RESERVED, *(name for name in names if name not in RESERVED)]
    partial = partial_file(folder.csv)
    try:
        with io.TextIOWrapper(open_new(partial), newline="", encoding="utf-8") as file:
            lines = csv.writer(file)
            lines.writerow(map(_to_cell, columns))
            for records in _read_pieces(folder, world_size, stride):
                lines.writerows([_to_cell(record.get(name)) for name in columns] for record in records)
                yield
        partial.replace(folder.csv)
    finally:  # A full disk needs the bytes of a table that is not complete.
        partial.unlink(missing_ok=True)


def compute_perplexity(loss: float) -> float:
    """Return the perplexity of a mean loss of tokens; NaN of NaN."""
    return math.inf if loss > MAX_EXPONENT else math.exp(loss)


def compute_curve(records: Iterable[Mapping[str, object]], name: str) -> dict[int, float]:
    """Return the values of ``name`` by step, each the mean over the ranks that logged it as a number."""
    return compute_curves(records, name)[name]


def compute_curves(records: Iterable[Mapping[str, object]], *names: str) -> dict[str, dict[int, float]]:
    """Return :func:`compute_curve` of each of ``names``, in one pass over ``records``."""
    sums: dict[str, dict[int, list[float]]] = {name: {} for name in names}
    for record in records:
        step = record.get("step")
        if not isinstance(step, int):
            continue
        for name, sums_by_step in sums.items():
            value = record.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                total = sums_by_step.setdefault(step, [0.0, 0.0])
                total[0] += value
                total[1] += 1
    return {
        name: {step: total / num_ranks for step, (total, num_ranks) in sorted(sums_by_step.items())}
        for name, sums_by_step in sums.items()
    }


def _compute_stride(folder: RunFolder, world_size: int) -> int:
    """Return n, where every n-th line fits into the table; 1: all lines."""
    num_bytes = sum(size_of(folder.events(rank)) for rank in range(world_size))
    return max(1, -(-num_bytes // MAX_BYTES))


def _read_pieces(folder: RunFolder, world_size: int, stride: int) -> Iterator[list[dict[str, object]]]:
    for rank in range(world_size):
        tail, size = LineTail(folder.events(rank)), size_of(folder.events(rank))
        first = 0
        # The stride goes on over the borders of pieces.
        for end in (*range(PIECE_BYTES, size, PIECE_BYTES), size):
            records = tail.read(end)
            yield records[first::stride]
            first = (first - len(records)) % stride


def _to_cell(value: object) -> object:
    """Return a CSV cell. Text that spreadsheets would run as a formula gets an apostrophe; numbers do not.

    The list of characters is from OWASP's page on CSV injection, with leading blanks and full-width forms.
    """
    value = finite_or_special(value)
    if not isinstance(value, str):
        return value
    is_formula = value[:1] in "\t\r\n" or value.lstrip()[:1] in FORMULA_STARTS
    return f"'{value}" if value and is_formula else value
