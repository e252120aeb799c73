"""Errors of predicted memory by source and kind of measurement."""

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
    """One row with a measured peak and its two predictions."""

    mapped: Mapped
    measured: float
    predicted: Compared
    """With the publisher's code modelled (``own_code``, ``nanotron``)."""
    product: Compared
    """By ``plan.memory()`` alone."""

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted.point / self.measured - 1

    @property
    def has_publisher_code(self) -> bool:
        """Return whether :attr:`predicted` includes modelled code that no plan expresses."""
        return has_publisher_code(self.mapped)

    @property
    def by_product(self) -> Scored:
        """Return the row with the prediction of ``plan.memory()`` alone."""
        return self._replace(predicted=self.product)

    @property
    def inside(self) -> bool:
        """Return whether the measured peak lies in the predicted band."""
        return self.predicted.low <= self.measured <= self.predicted.high

    @property
    def group(self) -> tuple[str, str]:
        """Return source and kind of measurement: each pair is scored separately."""
        return read_source(self.mapped.row), find_kind(self.mapped.row)


class Fit(NamedTuple):
    """One row that states whether it ran or ran out of memory."""

    mapped: Mapped
    ran: bool
    predicted: bool
    product: bool
    """Whether it fits by ``plan.memory()`` alone."""
    warned: bool = False
    """Whether it does not fit, or is tight, by ``plan.memory()``."""


class MemoryScore(NamedTuple):
    """All rows of one scoring."""

    scored: tuple[Scored, ...]
    fits: tuple[Fit, ...]
    unmapped: tuple[tuple[Row, str], ...]
    """Rows with a statement about memory that map to no plan, with the reason."""
    num_rows: int
    """All rows with a statement about memory: scored, only fit or out of memory, and unmapped."""

    @property
    def groups(self) -> dict[tuple[str, str], list[Scored]]:
        """Return the scored rows by source and kind."""
        groups: dict[tuple[str, str], list[Scored]] = defaultdict(list)
        for row in self.scored:
            groups[row.group].append(row)
        return dict(sorted(groups.items()))

    @property
    def by_product(self) -> MemoryScore:
        """Return the rows with the predictions of ``plan.memory()`` alone."""
        return self._replace(
            scored=tuple(row.by_product for row in self.scored),
            fits=tuple(fit._replace(predicted=fit.product) for fit in self.fits),
        )

    @property
    def reasons(self) -> Counter[str]:
        """Count the unmapped rows by reason."""
        return Counter(reason for _, reason in self.unmapped)


def score_memory(rows: Iterable[Row]) -> MemoryScore:
    """Score every row of quality A with a statement about memory."""
    chosen = sample_rows(row for row in rows if is_scored(row) and says_memory(row))
    scored: list[Scored] = []
    fits: list[Fit] = []
    unmapped: list[tuple[Row, str]] = []
    for row in chosen:
        try:
            mapped = map_row(row)
        except UnmappedError as reason:
            unmapped.append((row, str(reason)))
            continue
        product = mapped.plan.memory()
        report, held_back = predict_row(mapped)
        # A row that ran out of memory may print the peak it had before: not the one it needed.
        if has_peak(row) and read_status(row) != "oom":
            with_code = predict_measured_kind(row, report, held_back)
            scored.append(Scored(mapped, measured_bytes(row), with_code, predict_measured_kind(row, product)))
        # A run with two measurements counts once.
        if read_status(row) is not None and not row.get("same_run"):
            warned = product.is_tight or not product.fits
            fits.append(Fit(mapped, read_status(row) == "ok", report.fits, product.fits, warned))
    return MemoryScore(tuple(scored), tuple(fits), tuple(unmapped), len(chosen))


def predict_row(mapped: Mapped) -> tuple[MemoryReport, int]:
    """Predict the row's memory with the publisher's code, and the bytes that may stay reserved."""
    if mapped.framework == "nanotron":
        return nanotron.predict_memory(mapped.plan), nanotron.held_back_bytes(mapped.plan)
    product = mapped.plan.memory()
    try:
        return add_own_code(mapped.plan, product, mapped.own_code), 0
    except ValueError:
        # The pieces model known runs; a row of other sizes may have no such plan.
        return product, 0


def has_publisher_code(mapped: Mapped) -> bool:
    """Return whether code that no plan expresses is modelled for the row."""
    return mapped.framework == "nanotron" or bool(mapped.own_code)


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
    """Return the last line of the part about memory."""
    groups = score.groups
    summaries = summarize_groups(groups)
    sources = len({name for name, _ in groups})
    errors = (
        "no row scored"
        if summaries is None
        else (f"median of source medians {100 * summaries[0]:.1f} %, p90 {100 * summaries[1]:.1f} %")
    )
    return f"overall memory: {sources} sources, {len(score.scored)} of {score.num_rows} rows, {errors}"


def format_gib(num_bytes: float) -> str:
    """Format ``num_bytes`` in GiB with two decimals."""
    return f"{num_bytes / GIB:.2f}"
