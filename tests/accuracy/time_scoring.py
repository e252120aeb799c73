"""Errors of predicted step times, source by source."""

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
from tests.accuracy.time_own_code import beside_seconds
from tests.accuracy.time_row_plans import map_timed_row
from tests.accuracy.time_rows import list_configurations, step_seconds, tokens_rate
from tests.accuracy.unmapped_rows import UnmappedError

from shardscope.timing.report import StepReport


class TimeScored(NamedTuple):
    """One configuration that was timed, and what was predicted for it."""

    mapped: Mapped
    measured: float
    """Seconds of one step."""
    report: StepReport
    num_rows: int
    """Rows of the source with this configuration."""
    beside: float = 0.0
    """Seconds of code that ran beside the plan, described (``time_own_code``)."""

    @property
    def seconds(self) -> float:
        """Predicted: by ``plan.step()``, and what ran beside."""
        return self.report.seconds + self.beside

    @property
    def error(self) -> float:
        """Predicted seconds over measured ones, less one."""
        return self.seconds / self.measured - 1

    @property
    def by_product(self) -> TimeScored:
        """The same row as ``plan.step()`` alone has it."""
        return self._replace(beside=0.0)

    @property
    def predicted_rate(self) -> float:
        """Tokens a second of one GPU."""
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
    """Configurations that say how fast they were and have no plan, with the reason."""

    @property
    def num_configurations(self) -> int:
        """Configurations that say how fast they were: scored and unmapped."""
        return len(self.scored) + len(self.unmapped)

    @property
    def by_source(self) -> dict[str, list[TimeScored]]:
        """Scored configurations by source."""
        found: dict[str, list[TimeScored]] = defaultdict(list)
        for one in self.scored:
            found[one.source].append(one)
        return dict(sorted(found.items()))

    @property
    def by_product(self) -> TimeScore:
        """The same rows as ``plan.step()`` alone has them."""
        return self._replace(scored=tuple(one.by_product for one in self.scored))

    @property
    def reasons(self) -> Counter[str]:
        """Reason -> unmapped configurations."""
        return Counter(reason for _, reason in self.unmapped)

    def only(self, role: str) -> TimeScore:
        """The scored ones of one role."""
        return TimeScore(tuple(one for one in self.scored if one.role == role), ())


def score_time(rows: Iterable[Row]) -> TimeScore:
    """Scores every configuration of grade A that says how fast it was, by the catalogue's constants."""
    with ignore_calibrations():
        return _score_rows(rows)


def _score_rows(rows: Iterable[Row]) -> TimeScore:
    scored: list[TimeScored] = []
    unmapped: list[tuple[Row, str]] = []
    for found in list_configurations(rows):
        try:
            plan = map_timed_row(found.measured)
            with use_torch_of(found.row):
                report = apply_schedule(plan.schedule, plan.plan, plan.plan.step())
        except UnmappedError as reason:
            unmapped.append((found.row, str(reason)))
            continue
        measured = _compute_measured_seconds(found.measured, report)
        scored.append(TimeScored(plan, measured, report, len(found.rows), beside_seconds(plan, report)))
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
    """Spearman's, between predicted and measured tokens a second of one GPU; None for fewer than five."""
    if len(rows) < 5:
        return None
    return compute_spearman(
        [row.predicted_rate for row in rows],
        [row.tokens_per_second_per_gpu for row in rows],
    )


def rank_correlation_of_layouts(rows: Sequence[TimeScored]) -> float | None:
    """The same within configurations of one model on the same GPUs with one sequence length and precision.

    The mean over such groups of five or more, weighted by size; None without one.
    """
    groups: dict[tuple[object, ...], list[TimeScored]] = defaultdict(list)
    for row in rows:
        plan = row.mapped.plan
        what = (plan.architecture.name, plan.cluster.gpu.name, plan.world_size)
        groups[*what, plan.recipe.seq_len, plan.recipe.precision, plan.recipe.method].append(row)
    found = [(len(some), rank) for some in groups.values() if (rank := rank_correlation(some)) is not None]
    return sum(size * rank for size, rank in found) / sum(size for size, _ in found) if found else None


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
        for place in range(start, end + 1):
            ranks[order[place]] = (start + end) / 2
        start = end + 1
    return ranks


def summarize_groups(groups: dict[str, list[TimeScored]]) -> tuple[float, float] | None:
    """Return the median of the sources' medians and the 90th percentile of all rows; None without rows."""
    if not groups:
        return None
    errors = {name: sort_absolute_errors(rows) for name, rows in groups.items()}
    medians = [median(found) for found in errors.values()]
    return median(medians), compute_percentile(sorted(one for found in errors.values() for one in found), 0.9)


def count_scored(score: TimeScore) -> str:
    """Count sources, and scored rows among those that state a speed."""
    return f"{len(score.by_source)} sources, {len(score.scored)} of {score.num_configurations} rows"


def overall_line(score: TimeScore) -> str:
    """The one line that ends the report of a kind."""
    summaries = summarize_groups(score.by_source)
    words = (
        "no row scored"
        if summaries is None
        else f"median of source medians {100 * summaries[0]:.1f} %, p90 {100 * summaries[1]:.1f} %"
    )
    return f"overall time: {count_scored(score)}, {words}"
