"""``python -m tests.accuracy.fitting``: fits the constants of catalog/efficiency.toml on calibration rows.

Every constant belongs to a GPU generation, to modules' kernels, or to links; none to a model or a source.
What is made small is the mean over sources of what their rows lose, a source of many rows weighing as its
square root does, so that one sweep does not outweigh every other source. A row that is off by e (the log of
predicted over measured) loses e / (e + 0.25): a run that something else held up, or foreign code, weighs
little beside those that can be met (a redescending estimator: Geman & McClure 1985). The search goes along
one constant after another. Judge rows are never looked at.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from tests.accuracy.catalog_predictions import ignore_calibrations, use_torch_of
from tests.accuracy.row_plans import Mapped
from tests.accuracy.rows import read, read_source
from tests.accuracy.time_own_code import compute_own_code_seconds
from tests.accuracy.time_row_plans import map_timed_row
from tests.accuracy.time_rows import list_configurations, step_seconds, time_files, tokens_rate
from tests.accuracy.uncalibrated_stacks import OTHER_FRAMEWORKS
from tests.accuracy.unmapped_rows import UnmappedError

from shardscope.catalog import load_efficiency, load_toml
from shardscope.timing.rates import look_up_rates

# Group of tables and key -> the least and the most that it may be.
BOUNDS: dict[tuple[str, str], tuple[float, float]] = {
    ("matrices", "share"): (0.3, 0.95),
    ("matrices", "half_size"): (1.0, 600.0),
    ("matrices", "joules_per_flop"): (0.3e-12, 3e-12),
    ("matrices", "slower_unaligned"): (0.01, 1.0),
    ("attention", "forward"): (0.1, 0.9),
    ("attention", "backward"): (0.1, 0.9),
    ("cudnn_attention", "forward"): (0.1, 0.9),
    ("cudnn_attention", "backward"): (0.1, 0.9),
    ("memory", "share"): (0.5, 0.92),
    ("attention", "half_keys"): (1.0, 8192.0),
    ("passes", "forward"): (1.0, 8.0),
    ("passes", "backward"): (1.0, 16.0),
    ("passes", "kernels_forward"): (5.0, 400.0),
    ("passes", "kernels_backward"): (5.0, 800.0),
    ("launch", "seconds_per_kernel"): (0.2e-6, 30e-6),
    ("link", "share"): (0.1, 0.95),
    ("link", "latency_factor"): (0.1, 20.0),
}


_HALF_LOST = 0.25
"""The error at which half of what a row can lose is lost: far beyond what the same run differs by."""


class Constant(NamedTuple):
    """One number of the catalogue."""

    table: str
    name: str
    key: str

    @property
    def value(self) -> float:
        """Return the constant's current value."""
        return float(_find_table(self)[self.key])

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the most that it may be."""
        return BOUNDS[self.table, self.key]

    def __str__(self) -> str:
        return f"{self.table}.{self.name}.{self.key}"


class Fitted(NamedTuple):
    """One calibration row, ready to be timed with other constants."""

    mapped: Mapped
    log_seconds: float
    source: str


def list_constants() -> list[Constant]:
    """List all fitted constants: those of the catalogue for one GPU generation, and its links."""
    constants = []
    for table, key in BOUNDS:
        for name, fields in load_toml("efficiency").get(table, {}).items():
            has_generations = len(load_efficiency()[table]) > 1 and table != "link"
            # What somebody has counted is no matter of fitting.
            is_counted = str(fields["source"]).startswith("counted")
            if key in fields and not is_counted and not (has_generations and name == "default"):
                constants.append(Constant(table, name, key))
    return constants


def calibration_rows() -> list[Fitted]:
    """Every configuration of grade A and role ``calibration`` that has a plan in a framework of ours."""
    results = []
    for one in list_configurations(read(time_files())):
        if one.row.get("role") != "calibration":
            continue
        try:
            mapped = map_timed_row(one.measured)
        except UnmappedError:
            continue
        if mapped.framework in OTHER_FRAMEWORKS:
            continue
        rate, seconds = tokens_rate(one.measured), step_seconds(one.measured)
        recipe = mapped.plan.recipe
        if rate is not None:
            seconds = recipe.global_batch_size * recipe.seq_len / mapped.plan.world_size / rate
        assert seconds is not None
        results.append(Fitted(mapped, math.log(seconds), read_source(one.row)))
    return results


def log_errors(rows: Sequence[Fitted]) -> list[float]:
    """log(predicted / measured) of each row, with the constants as they are now."""
    look_up_rates.cache_clear()
    results = []
    for row in rows:
        with use_torch_of(row.mapped.row):
            report = row.mapped.plan.step()
        results.append(
            math.log(report.seconds + compute_own_code_seconds(row.mapped, report)) - row.log_seconds
        )
    return results


def compute_loss(rows: Sequence[Fitted]) -> float:
    """Compute the loss that the fit minimizes: 0 to 1."""
    by_source: dict[str, list[float]] = defaultdict(list)
    for row, error in zip(rows, log_errors(rows), strict=True):
        by_source[row.source].append(abs(error) / (abs(error) + _HALF_LOST))
    weights = {name: math.sqrt(len(lost)) for name, lost in by_source.items()}
    total = sum(weights[name] * sum(lost) / len(lost) for name, lost in by_source.items())
    return total / sum(weights.values())


def fit_constants(
    rows: Sequence[Fitted], chosen: Sequence[Constant], rounds: int = 4
) -> dict[Constant, float]:
    """Find the values with the smallest loss, along one constant after another."""
    with restore_constants():
        best, factor = compute_loss(rows), 1.3
        for _ in range(rounds):
            for constant in chosen:
                best = _search_along(rows, constant, best, factor)
            factor = 1 + (factor - 1) / 2
        return {constant: constant.value for constant in chosen}


def _search_along(rows: Sequence[Fitted], constant: Constant, best: float, factor: float) -> float:
    """Step up or down while that helps."""
    low, high = constant.bounds
    for step_factor in (factor, 1 / factor):
        moved = False
        while True:
            was = constant.value
            _find_table(constant)[constant.key] = min(high, max(low, was * step_factor))
            found = compute_loss(rows)
            if found >= best - 1e-6:
                _find_table(constant)[constant.key] = was
                break
            best, moved = found, True
        if moved:
            break
    return best


def count_affected_rows(rows: Sequence[Fitted], constant: Constant) -> int:
    """Count the rows whose step changes by a thousandth or more if the constant changes by a tenth."""
    with restore_constants():
        before = log_errors(rows)
        _find_table(constant)[constant.key] = constant.value * 0.9
        after = log_errors(rows)
    return sum(abs(a - b) > 1e-3 for a, b in zip(before, after, strict=True))


@contextmanager
def restore_constants() -> Iterator[None]:
    """Restore every constant at the end."""
    kept = {constant: constant.value for constant in list_constants()}
    try:
        yield
    finally:
        for constant, value in kept.items():
            _find_table(constant)[constant.key] = value
        look_up_rates.cache_clear()


def _find_table(constant: Constant) -> dict[str, float]:
    return load_efficiency()[constant.table][constant.name]


def main(arguments: list[str] | None = None) -> None:
    """Prints every constant, what it was fitted to, and on how many rows."""
    parser = argparse.ArgumentParser(prog="python -m tests.accuracy.fitting", description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--only", nargs="*", default=[], help="constants whose names contain one of these")
    chosen = parser.parse_args(arguments)
    with ignore_calibrations():
        _print_fit(chosen.only, chosen.rounds)


def _print_fit(only: Sequence[str], rounds: int) -> None:
    rows = calibration_rows()
    wanted = [one for one in list_constants() if not only or any(word in str(one) for word in only)]
    known = [(constant, count_affected_rows(rows, constant)) for constant in wanted]
    print(f"{len(rows)} calibration rows, loss {compute_loss(rows):.4f}")
    found = fit_constants(rows, [constant for constant, count in known if count], rounds)
    for constant, count in known:
        print(
            f"{constant} = {found.get(constant, constant.value):.4g} (was {constant.value:.4g}), {count} rows"
        )
    with restore_constants():
        for constant, value in found.items():
            _find_table(constant)[constant.key] = value
        print(f"loss {compute_loss(rows):.4f}")


if __name__ == "__main__":
    main()
