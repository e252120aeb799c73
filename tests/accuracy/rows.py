"""Rows of measured runs: reading them, their grade, and a fixed sample of sources that would swamp others."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.accuracy.row_files import read_objects
from tests.accuracy.row_normalization import normalize_row
from tests.accuracy.unmapped_rows import UnmappedError

Row = Mapping[str, Any]

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "tests" / "measured"
OWN = MEASURED / "own.jsonl"
SHARED = ROOT.parent / "shared" / "data" / "measured.jsonl"
_RAN = ("ok", "success", "succeeded", "fits", "passed", "completed", "ran")
_RAN_OUT = ("oom", "out of memory", "cuda out of memory", "cuda oom", "does not fit")
_NO_SIZE = 1e18
"""No parameters, tokens or ranks are so many: what a float holds to the digit, and more."""
LARGEST_SOURCE = 150
"""Rows of one source that are scored: of more, a fixed sample."""


def default_files() -> list[Path]:
    """The rows that come with the project, and a wider collection where there is one beside it."""
    kept = sorted(path for path in MEASURED.glob("*.jsonl") if path != OWN)
    return kept + ([SHARED] if SHARED.is_file() else [])


def read(files: Iterable[Path], broken: list[str] | None = None) -> list[Row]:
    """Every row of the files, tidied; of several with one id the first.

    Lines that are no JSON object are left out and named in ``broken``; without it they raise ``ValueError``.
    """
    results: dict[str, Row] = {}
    for path in files:
        for number, row in read_objects(path):
            if isinstance(row, str):
                words = f"{path.name}, line {number} {row}: a row is one JSON object"
                if broken is None:
                    raise ValueError(words)
                broken.append(words)
                continue
            results.setdefault(str(row.get("id", f"{path.name}:{number}")), normalize_row(row))
    return list(results.values())


def read_source(row: Row) -> str:
    """Return the publisher of the row."""
    return str(row.get("source") or "source not stated")


def is_scored(row: Row) -> bool:
    """Return whether the row's configuration is nearly complete; a row that does not say counts as such."""
    return str(row.get("quality") or "A").upper().startswith("A")


def says_memory(row: Row) -> bool:
    """Return whether the row has a peak, or says that there was not enough."""
    return has_peak(row) or read_status(row) == "oom"


def has_peak(row: Row) -> bool:
    """Return whether the row has a measured peak."""
    peak = row.get("peak_memory_gib")
    return isinstance(peak, int | float) and not isinstance(peak, bool) and 0 < peak < 1e6


def read_status(row: Row) -> str | None:
    """Return ``ok`` or ``oom``; None if other failures are mixed in, or nothing is stated."""
    text = re.sub(r"[^a-z]+", " ", str(row.get("status") or "").lower()).strip()
    if text in _RAN:
        return "ok"
    if text in _RAN_OUT:
        return "oom"
    return "ok" if not text and has_peak(row) else None


def sample_rows(rows: Iterable[Row]) -> list[Row]:
    """Sample a large source, the same on every machine and in every order; keep all other rows."""
    by_source: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_source[read_source(row)].append(row)
    kept: list[Row] = []
    for name in sorted(by_source):
        group = sorted(by_source[name], key=lambda row: str(row.get("id")))
        if len(group) > LARGEST_SOURCE:
            chosen = random.Random(f"accuracy {name}").sample(range(len(group)), LARGEST_SOURCE)
            group = [group[index] for index in sorted(chosen)]
        kept += group
    return kept


def join_fields(row: Row, *keys: str) -> str:
    """Join the named fields to one lower-case text; missing ones are left out."""
    return " ".join(str(row[key]) for key in keys if row.get(key) is not None).lower()


def read_number(row: Row, key: str) -> int | None:
    """Return a whole number of the row, or None. Raises ``UnmappedError`` for other text."""
    value = row.get(key)
    if isinstance(value, str | list | tuple | dict) or value is True:
        # "2 or 4" is not the same as nothing, of which readers make a default.
        raise UnmappedError(f"{key} {value!r} is no whole number")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _NO_SIZE:
        return None
    return int(value) if float(value).is_integer() else None
