"""Errors of predicted step times by source."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from tests.accuracy.catalog_predictions import ignore_calibrations, use_torch_of
from tests.accuracy.row_plans import Mapped
from tests.accuracy.rows import Row, read_source
from tests.accuracy.schedules import apply_schedule
from tests.accuracy.scoring import compute_percentile
from tests.accuracy.time_own_code import compute_own_code_seconds
from tests.accuracy.time_row_plans import map_timed_row
from tests.accuracy.time_rows import list_configurations, step_seconds, tokens_rate
from tests.accuracy.unmapped_rows import UnmappedError

from shardscope.timing.report import StepReport


class TimeScored(NamedTuple):
    """One measured configuration and its prediction."""

    mapped: Mapped
    measured: float
    """Seconds of one step."""
    report: StepReport
    num_rows: int
    """Rows of the source with this configuration."""
    publisher_code_seconds: float = 0.0
    """Modelled seconds of the publisher's own code (``time_own_code``)."""

    @property
    def seconds(self) -> float:
        """Return the predicted seconds, with the publisher's code."""
        return self.report.seconds + self.publisher_code_seconds

    @property
    def error(self) -> float:
        """Predicted seconds over measured ones, less one."""
        return self.seconds / self.measured - 1

    @property
    def by_product(self) -> TimeScored:
        """Return the row with the prediction of ``plan.step()`` alone."""
        return self._replace(publisher_code_seconds=0.0)

    @property
    def predicted_rate(self) -> float:
        """Return the predicted tokens per second and GPU."""
        return self.report.num_tokens / self.report.num_gpus / self.seconds

    @property
    def source(self) -> str:
        """Return the publisher of the measurement."""
        return read_source(self.mapped.row)

    @property
    def role(self) -> str:
        """``calibration`` or ``judge``."""
        return str(self.mapped.row.get("role") or "judge")

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """The measured rate."""
        return self.report.num_tokens / self.report.num_gpus / self.measured


class TimeScore(NamedTuple):
    """All configurations of one scoring."""

    scored: tuple[TimeScored, ...]
    unmapped: tuple[tuple[Row, str], ...]
    """Configurations with a speed that map to no plan, with the reason."""

    @property
    def num_configurations(self) -> int:
        """Return the number of configurations with a speed: scored and unmapped."""
        return len(self.scored) + len(self.unmapped)

    @property
    def by_source(self) -> dict[str, list[TimeScored]]:
        """Return the scored configurations by source."""
        groups: dict[str, list[TimeScored]] = defaultdict(list)
        for one in self.scored:
            groups[one.source].append(one)
        return dict(sorted(groups.items()))

    @property
    def by_product(self) -> TimeScore:
        """Return the rows with the predictions of ``plan.step()`` alone."""
        return self._replace(scored=tuple(one.by_product for one in self.scored))

    @property
    def reasons(self) -> Counter[str]:
        """Count the unmapped configurations by reason."""
        return Counter(reason for _, reason in self.unmapped)

    def only(self, role: str) -> TimeScore:
        """Return the scored configurations of one role."""
        return TimeScore(tuple(one for one in self.scored if one.role == role), ())


def score_time(rows: Iterable[Row]) -> TimeScore:
    """Score every configuration of quality A with a speed, by the catalogue's constants."""
    with ignore_calibrations():
        return _score_rows(rows)


def _score_rows(rows: Iterable[Row]) -> TimeScore:
    scored: list[TimeScored] = []
    unmapped: list[tuple[Row, str]] = []
    for configuration in list_configurations(rows):
        try:
            mapped = map_timed_row(configuration.measured)
            with use_torch_of(configuration.row):
                report = apply_schedule(mapped.schedule, mapped.plan, mapped.plan.step())
        except UnmappedError as reason:
            unmapped.append((configuration.row, str(reason)))
            continue
        measured = _compute_measured_seconds(configuration.measured, report)
        own_seconds = compute_own_code_seconds(mapped, report)
        scored.append(TimeScored(mapped, measured, report, len(configuration.rows), own_seconds))
    return TimeScore(tuple(scored), tuple(unmapped))


def _compute_measured_seconds(row: Row, report: StepReport) -> float:
    """Compute the seconds of one step of the plan at the row's rate.

    By tokens a second where the row has them: a plan's batch may be rounded, and what a table calls a step
    may be another.
    """
    rate, seconds = tokens_rate(row), step_seconds(row)
    if rate is None:
        assert seconds is not None
        return seconds
    return report.num_tokens / report.num_gpus / rate


def sort_absolute_errors(rows: Sequence[TimeScored]) -> list[float]:
    """Return the absolute relative errors, smallest first."""
    return sorted(abs(row.error) for row in rows)


def rank_correlation(rows: Sequence[TimeScored]) -> float | None:
    """Return the rank correlation of predicted and measured tokens/s per GPU; None below five rows."""
    if len(rows) < 5:
        return None
    return compute_spearman(
        [row.predicted_rate for row in rows],
        [row.tokens_per_second_per_gpu for row in rows],
    )


def rank_correlation_of_layouts(rows: Sequence[TimeScored]) -> float | None:
    """Return the rank correlation within groups of one model, GPUs, sequence length, precision and method.

    This is the mean over groups of five or more, weighted by size; None without one.
    """
    groups: dict[tuple[object, ...], list[TimeScored]] = defaultdict(list)
    for row in rows:
        plan = row.mapped.plan
        what = (plan.architecture.name, plan.cluster.gpu.name, plan.world_size)
        groups[*what, plan.recipe.seq_len, plan.recipe.precision, plan.recipe.method].append(row)
    ranked = [(len(some), rank) for some in groups.values() if (rank := rank_correlation(some)) is not None]
    return sum(size * rank for size, rank in ranked) / sum(size for size, _ in ranked) if ranked else None


def compute_spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Compute the rank correlation, ties at their mean rank; None where one side does not vary."""
    ranks = [_rank_values(first), _rank_values(second)]
    middle = (len(first) - 1) / 2
    both = sum((a - middle) * (b - middle) for a, b in zip(*ranks, strict=True))
    squares = [sum((rank - middle) ** 2 for rank in one) for one in ranks]
    return both / (squares[0] * squares[1]) ** 0.5 if min(squares) > 0 else None


def _rank_values(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for index in range(start, end + 1):
            ranks[order[index]] = (start + end) / 2
        start = end + 1
    return ranks


def summarize_groups(groups: dict[str, list[TimeScored]]) -> tuple[float, float] | None:
    """Return the median of the sources' medians and the 90th percentile of all rows; None without rows."""
    if not groups:
        return None
    errors = {name: sort_absolute_errors(rows) for name, rows in groups.items()}
    medians = [median(some) for some in errors.values()]
    return median(medians), compute_percentile(sorted(one for some in errors.values() for one in some), 0.9)


def count_scored(score: TimeScore) -> str:
    """Count sources, and scored rows among those that state a speed."""
    return f"{len(score.by_source)} sources, {len(score.scored)} of {score.num_configurations} rows"


def overall_line(score: TimeScore) -> str:
    """Return the last line of the part about time."""
    summaries = summarize_groups(score.by_source)
    errors = (
        "no row scored"
        if summaries is None
        else f"median of source medians {100 * summaries[0]:.1f} %, p90 {100 * summaries[1]:.1f} %"
    )
    return f"overall time: {count_scored(score)}, {errors}"
