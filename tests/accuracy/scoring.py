"""Errors of one kind of prediction, source by source."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from tests.accuracy import nanotron
from tests.accuracy.measurement_kinds import GIB, Compared, find_kind, measured_bytes, predict_measured_kind
from tests.accuracy.own_code import add_own_code
from tests.accuracy.row_plans import Mapped, map_row
from tests.accuracy.rows import Row, has_peak, is_scored, read_source, read_status, sample_rows, says_memory
from tests.accuracy.unmapped_rows import UnmappedError

from shardscope.memory.report import MemoryReport


class Scored(NamedTuple):
    """One row with a measured peak, and what was predicted for it."""

    mapped: Mapped
    measured: float
    predicted: Compared
    """With what ran beside the plan described from its published code (``own_code``, ``nanotron``)."""
    alone: Compared
    """By ``plan.memory()`` and nothing else: the product."""

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted.point / self.measured - 1

    @property
    def is_described(self) -> bool:
        """Whether something ran beside the plan, so that :attr:`predicted` is not the product's word."""
        return is_described(self.mapped)

    @property
    def by_product(self) -> Scored:
        """The same row as ``plan.memory()`` alone has it."""
        return self._replace(predicted=self.alone)

    @property
    def inside(self) -> bool:
        """Return whether the measured peak lies in the predicted band."""
        return self.predicted.low <= self.measured <= self.predicted.high

    @property
    def group(self) -> tuple[str, str]:
        """Source and kind of memory: what is scored apart."""
        return read_source(self.mapped.row), find_kind(self.mapped.row)


class Fit(NamedTuple):
    """One row that says whether it ran or ran out of memory."""

    mapped: Mapped
    ran: bool
    predicted: bool
    alone: bool
    """By ``plan.memory()`` and nothing else."""
    warned: bool = False
    """Whether ``plan.memory()`` says that it does not fit, or that it is tight."""


class MemoryScore(NamedTuple):
    """All rows of one scoring."""

    scored: tuple[Scored, ...]
    fits: tuple[Fit, ...]
    unmapped: tuple[tuple[Row, str], ...]
    """Rows that say something about memory and have no plan, with the reason."""
    num_rows: int
    """Rows that say something about memory: scored, fits-or-not only, and unmapped."""

    @property
    def groups(self) -> dict[tuple[str, str], list[Scored]]:
        """Scored rows by source and kind."""
        found: dict[tuple[str, str], list[Scored]] = defaultdict(list)
        for row in self.scored:
            found[row.group].append(row)
        return dict(sorted(found.items()))

    @property
    def by_product(self) -> MemoryScore:
        """The same rows as ``plan.memory()`` alone has them."""
        return self._replace(
            scored=tuple(row.by_product for row in self.scored),
            fits=tuple(fit._replace(predicted=fit.alone) for fit in self.fits),
        )

    @property
    def reasons(self) -> Counter[str]:
        """Reason -> unmapped rows."""
        return Counter(reason for _, reason in self.unmapped)


def score_memory(rows: Iterable[Row]) -> MemoryScore:
    """Scores every row of grade A that says something about memory."""
    chosen = sample_rows(row for row in rows if is_scored(row) and says_memory(row))
    scored: list[Scored] = []
    fits: list[Fit] = []
    unmapped: list[tuple[Row, str]] = []
    for row in chosen:
        try:
            found = map_row(row)
        except UnmappedError as reason:
            unmapped.append((row, str(reason)))
            continue
        product = found.plan.memory()
        report, held_back = predict_row(found)
        # A row that ran out of memory may print the peak it had before: not the one it needed.
        if has_peak(row) and read_status(row) != "oom":
            with_code = predict_measured_kind(row, report, held_back)
            scored.append(Scored(found, measured_bytes(row), with_code, predict_measured_kind(row, product)))
        # A run that is measured twice ran once.
        if read_status(row) is not None and not row.get("same_run"):
            warned = product.is_tight or not product.fits
            fits.append(Fit(found, read_status(row) == "ok", report.fits, product.fits, warned))
    return MemoryScore(tuple(scored), tuple(fits), tuple(unmapped), len(chosen))


def predict_row(found: Mapped) -> tuple[MemoryReport, int]:
    """Predict the row's memory by its framework's own model, and the bytes that it may keep reserved."""
    if found.framework == "nanotron":
        return nanotron.predict_memory(found.plan), nanotron.held_back_bytes(found.plan)
    product = found.plan.memory()
    try:
        return add_own_code(found.plan, product, found.own_code), 0
    except ValueError:
        # What was described is code of known runs; a row of other sizes may have no such plan.
        return product, 0


def is_described(found: Mapped) -> bool:
    """Return whether code beside ``plan.memory()`` answers for the row."""
    return found.framework == "nanotron" or bool(found.own_code)


def sort_absolute_errors(rows: Sequence[Scored]) -> list[float]:
    """Return the absolute relative errors, smallest first."""
    return sorted(abs(row.error) for row in rows)


def compute_percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest of ``values`` (sorted, not empty) that ``share`` of them do not exceed."""
    index = max(0, -(-int(share * 1000 * len(values)) // 1000) - 1)
    return values[min(index, len(values) - 1)]


def summarize_groups(groups: dict[tuple[str, str], list[Scored]]) -> tuple[float, float] | None:
    """Return the median of the sources' medians and the 90th percentile of all rows; None without rows."""
    if not groups:
        return None
    medians = [median(sort_absolute_errors(rows)) for rows in groups.values()]
    return median(medians), compute_percentile(
        sorted(error for rows in groups.values() for error in sort_absolute_errors(rows)), 0.9
    )


def overall_line(score: MemoryScore) -> str:
    """The one line that ends the report of a kind."""
    groups = score.groups
    summaries = summarize_groups(groups)
    sources = len({name for name, _ in groups})
    words = (
        "no row scored"
        if summaries is None
        else (f"median of source medians {100 * summaries[0]:.1f} %, p90 {100 * summaries[1]:.1f} %")
    )
    return f"overall memory: {sources} sources, {len(score.scored)} of {score.num_rows} rows, {words}"


def format_gib(num_bytes: float) -> str:
    """``num_bytes`` in GiB with two decimals."""
    return f"{num_bytes / GIB:.2f}"
