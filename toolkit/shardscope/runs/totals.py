"""Totals of a run's metrics, for lists of runs: computed once and cached in the folder of an ended run.

The cache ``summary.json`` is used only if it was computed from the current files, by size and modification
time. It needs no protection: anyone who can forge it can forge the metrics as well.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.core.serialization import replace_fields
from shardscope.records.folder import FINAL, RunFolder
from shardscope.records.json_files import (
    LineTail,
    finite_or_special,
    parse_lines,
    read_json,
    read_tail,
    write_json,
)
from shardscope.records.json_values import is_int, is_number
from shardscope.records.metrics_table import compute_curve
from shardscope.records.regular_files import check_regular, size_of

if TYPE_CHECKING:
    from shardscope.runs.run import Run

TAIL_BYTES = 2**20
"""Bytes read from the end of each rank's metrics for last loss and median step: thousands of steps."""
ALL_TAILS_BYTES = 2**26
MAX_STEPS_BYTES = 2**30
"""Maximum total size of the metrics in which steps are counted."""
# Matches the output of ``records.encode``. Inside a text value the quotes would be escaped, so none matches.
_STEP = re.compile(rb'"step":\s*(\d{1,17})(?=\s*[,}])')


@dataclass(frozen=True, kw_only=True)
class RunTotals:
    """Totals of one run; None where unknown."""

    plan: str
    """Description of the plan."""
    num_steps: int | None = None
    """Number of distinct steps that ranks logged."""
    loss: float | None = None
    """Last loss, averaged over ranks."""
    step_seconds: float | None = None
    """Median step time; only of the last steps if the run was long."""
    tensor_bytes: int | None = None
    """Measured tensor bytes at the peak; None if there is no prediction to compare with."""
    predicted_tensor_bytes: int | None = None
    memory_error: float | None = None
    """(predicted - measured) / measured."""


def compute_totals(run: Run) -> RunTotals:
    """Return the totals of ``run``. Raises ``ValueError`` if one of its files is not a regular file."""
    folder = RunFolder(run.folder)
    # Before reading the metrics: a record logged in the meantime must invalidate the cache.
    source = _hash_sources(folder)
    cached = _read_cache(folder, source)
    if cached is not None:
        return cached
    from shardscope.runs.run import Run

    # Use a temporary handle: a handle keeps its plan and the metrics that it has read in memory.
    totals = _compute_from_files(Run(folder), folder)
    if run.status in FINAL:
        _write_cache(folder, totals, source)
    return totals


def iterate_records(run: Run) -> Iterator[dict[str, object]]:
    """Yield the records of ``run.metrics()`` without keeping them in memory.

    Raises ``ValueError`` if one of the files is not a regular file.
    """
    folder = RunFolder(run.folder)
    for rank in range(run.world_size):
        check_regular(folder.events(rank))
        for lines in LineTail(folder.events(rank)).read_pieces():
            yield from map(_restore_special, parse_lines(lines).records)


def _compute_from_files(run: Run, folder: RunFolder) -> RunTotals:
    from shardscope.runs.explain.measured import sum_predicted_tensors
    from shardscope.timing.calibration.finished_runs import compute_median_step

    tail_bytes = min(TAIL_BYTES, ALL_TAILS_BYTES // run.world_size)
    latest = [
        _restore_special(record)
        for rank in range(run.world_size)
        # The first line of a tail is usually incomplete, and `parse_lines` skips it.
        for record in parse_lines(read_tail(folder.events(rank), tail_bytes)).records
    ]
    losses, median = compute_curve(latest, "loss"), compute_median_step(latest)
    memory = run.memory()
    error = memory.error if memory.tensor_bytes else None
    return RunTotals(
        plan=_describe_plan(run),
        num_steps=_count_steps([folder.events(rank) for rank in range(run.world_size)]),
        loss=losses[max(losses)] if losses else None,
        step_seconds=median[1] if median else None,
        tensor_bytes=memory.tensor_bytes if error is not None else None,
        predicted_tensor_bytes=None if memory.predicted is None else sum_predicted_tensors(memory.predicted),
        memory_error=None if memory.lacks_optimizer else error,
    )


def _count_steps(files: list[Path]) -> int | None:
    if sum(map(size_of, files)) > MAX_STEPS_BYTES:
        return None
    # Digits as bytes: parsing gigabytes of lines as JSON would take minutes.
    steps: set[bytes] = set()
    for file in files:
        for lines in LineTail(file).read_pieces():
            steps.update(_STEP.findall(lines))
    return len(steps)


def _describe_plan(run: Run) -> str:
    try:
        plan = run.plan
    except ValueError:
        return "cannot be read"
    return f"{plan.architecture.name}, {plan.cluster}, {plan.layout.full_description}"


def _restore_special(record: dict[str, object]) -> dict[str, object]:
    return {name: finite_or_special(value) for name, value in record.items()}


# ---- summary.json


def _hash_sources(folder: RunFolder) -> str:
    """Return a hash of the source files' sizes and modification times and of this package's version."""
    from shardscope.core.version import __version__

    # A new version may compute the totals in another way.
    parts = [__version__, _stamp_file(folder.run_json)]
    for path in (folder.events(0).parent, folder.engine_report(0).parent):
        try:
            with os.scandir(path) as entries:
                parts += sorted(f"{entry.name} {_stamp_file(Path(entry.path))}" for entry in entries)
        except (FileNotFoundError, NotADirectoryError):
            continue
    return hashlib.sha256("\0".join(parts).encode(errors="replace")).hexdigest()


def _stamp_file(path: Path) -> str:
    status = check_regular(path)
    return "" if status is None else f"{status.st_size} {status.st_mtime_ns}"


def _read_cache(folder: RunFolder, source: str) -> RunTotals | None:
    record = read_json(folder.summary)
    if record is None or record.pop("source", None) != source or not isinstance(record.get("plan"), str):
        return None
    # The file may have been edited: every value must have the type that it would be computed with.
    integers = ("num_steps", "tensor_bytes", "predicted_tensor_bytes")
    for name, value in record.items():
        if name == "plan" or value is None:
            continue
        if name in ("loss", "step_seconds", "memory_error"):
            record[name] = value = finite_or_special(value)
            is_valid = isinstance(value, float) or is_number(value)
        else:
            is_valid = name in integers and is_int(value) and value >= 0
        if not is_valid:
            return None
    return replace_fields(RunTotals(plan=""), record)


def _write_cache(folder: RunFolder, totals: RunTotals, source: str) -> None:
    """Write ``summary.json``, but only into a folder that this user owns."""
    with contextlib.suppress(OSError):
        if hasattr(os, "getuid") and folder.path.stat().st_uid == os.getuid():
            write_json(folder.summary, {**asdict(totals), "source": source})
