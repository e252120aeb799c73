"""Rows that say how fast a run was: which are scored, how fast, and which are one configuration twice."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import NamedTuple

from tests.accuracy.rows import MEASURED, SHARED, Row, default_files, is_scored, read_source, sample_rows

TIMES = MEASURED / "time"
"""Rows that say nothing of memory."""
_REPEATING = re.compile(r"performance summary|dgxc-benchmarking")
"""Sources of one table a release, in which the same configuration comes again."""
_NO_CONFIGURATION = {
    *("id", "source_url", "table", "notes", "quality", "status", "from_memory", "role", "date", "versions"),
    *("tokens_per_s_per_gpu", "step_time_s", "samples_per_s", "tflops_per_gpu", "mfu", "hfu"),
    *("peak_memory_gib", "memory_kind", "memory_raw", "derived_fields", "flop_convention"),
    *("grad_accum", "nodes", "dp"),
}
"""Keys that say what came out, or where it is written; and those that follow from others."""


def time_files() -> list[Path]:
    """The rows that come with the project, and a wider collection where there is one beside it."""
    shared = [SHARED] if SHARED.is_file() else []
    return [path for path in default_files() if path not in shared] + sorted(TIMES.glob("*.jsonl")) + shared


def says_time(row: Row) -> bool:
    """Whether the row has a step time or tokens a second; of a run that is there twice, the first row."""
    return (tokens_rate(row) is not None or step_seconds(row) is not None) and not row.get("same_run")


def tokens_rate(row: Row) -> float | None:
    """Tokens a second of one GPU; None where the row does not say."""
    return _parse_positive(row.get("tokens_per_s_per_gpu"))


def step_seconds(row: Row) -> float | None:
    """Seconds of one optimizer step; None where the row does not say."""
    return _parse_positive(row.get("step_time_s"))


def _parse_positive(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 < value < 1e12 else None  # type: ignore[operator, arg-type]


class Configuration(NamedTuple):
    """One configuration of one source, and every row that measured it."""

    row: Row
    """The first, by its id."""
    rows: tuple[Row, ...]

    @property
    def measured(self) -> Row:
        """The first row with the median of all measured rates, or step times where only those are said."""
        rates = [rate for row in self.rows if (rate := tokens_rate(row)) is not None]
        if len(rates) == len(self.rows):
            return {**self.row, "tokens_per_s_per_gpu": median(rates)}
        steps = [seconds for row in self.rows if (seconds := step_seconds(row)) is not None]
        kept = {key: value for key, value in self.row.items() if key != "tokens_per_s_per_gpu"}
        return {**kept, "step_time_s": median(steps)} if len(steps) == len(self.rows) else self.row


def list_configurations(rows: Iterable[Row]) -> list[Configuration]:
    """List every configuration of grade A with a speed; of a large source a fixed sample.

    NVIDIA's tables come with each release, so that one configuration may have several figures: their median
    counts once. Other sources' rows are runs of their own.
    """
    groups: dict[str, list[Row]] = defaultdict(list)
    singles: list[Row] = []
    for row in rows:
        if not (is_scored(row) and says_time(row)):
            continue
        if _REPEATING.search(read_source(row)):
            groups[_find_key(row)].append(row)
        else:
            singles.append(row)
    found = [_make_configuration(group) for group in groups.values()]
    first = {id(one.row): one for one in found}
    kept = sample_rows([*singles, *(one.row for one in found)])
    return [first.get(id(row)) or Configuration(row, (row,)) for row in kept]


def _make_configuration(group: list[Row]) -> Configuration:
    rows = tuple(sorted(group, key=lambda row: str(row.get("id"))))
    return Configuration(rows[0], rows)


def _find_key(row: Row) -> str:
    """Return all that identifies a configuration, the model's name without brackets and release."""
    said = {key: value for key, value in row.items() if key not in _NO_CONFIGURATION and value is not None}
    name = re.sub(r"[^a-z0-9]+", "", str(said.get("model", "")).lower().replace("dense", ""))
    return json.dumps({**said, "model": name, "role": row.get("role")}, sort_keys=True, default=str)
