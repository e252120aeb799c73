"""Tests of step-time errors against fixed limits: a formula that increases them fails here within seconds."""

from __future__ import annotations

from statistics import median

import pytest
from tests.accuracy.document import DOCUMENT, split_parts
from tests.accuracy.rows import SHARED, read
from tests.accuracy.time_report import time_report
from tests.accuracy.time_rows import time_files
from tests.accuracy.time_scoring import (
    TimeScore,
    rank_correlation,
    score_time,
    sort_absolute_errors,
    summarize_groups,
)
from tests.accuracy.uncalibrated_stacks import select_calibrated
from tests.requirements import sample

# Source -> limit of the median absolute error on its judge rows in percent, with a small margin.
MEDIANS = {
    "BLOOM": 9.0,
    "FMS-acceleration": 6.0,
    "Korthikanti": 7.0,
    "skills/docs": 76.0,
    "Megatron-Bridge performance": 15.0,
    "dgxc-benchmarking": 5.0,
    "NeMo Automodel": 22.0,
    "Qwen": 18.0,
    "Zero Bubble": 8.0,
    "llm-foundry": 5.0,
    "nanotron": 70.0,
    "torchtitan": 7.0,
}
# Sources that sweep layouts -> limit of the rank correlation over all their rows, with a small margin.
RANKS = {
    "BLOOM": 0.90,
    "Korthikanti": 0.95,
    "Megatron-Bridge performance": 0.92,
    "dgxc-benchmarking": 0.97,
    "Zero Bubble": 0.97,
    "llm-foundry": 0.98,
    "nanotron": 0.80,
    "torchtitan": 0.90,
}


@pytest.fixture(scope="module")
def score() -> TimeScore:
    return score_time(read(path for path in time_files() if path != SHARED))


@sample(3)
@pytest.mark.parametrize(("name", "percent"), MEDIANS.items())
def test_median_time_error_of_each_source_is_within_its_limit(
    score: TimeScore, name: str, percent: float
) -> None:
    (rows,) = [rows for source, rows in score.only("judge").by_source.items() if name in source]
    assert 100 * median(sort_absolute_errors(rows)) <= percent


@pytest.mark.parametrize(("name", "least"), RANKS.items())
def test_rank_correlation_of_each_source_is_within_its_limit(
    score: TimeScore, name: str, least: float
) -> None:
    (rows,) = [rows for source, rows in score.by_source.items() if name in source]
    correlation = rank_correlation(rows)
    assert correlation is not None
    assert correlation >= least


def test_every_source_has_a_limit(score: TimeScore) -> None:
    for source in score.by_source:
        assert [1 for name in MEDIANS if name in source] == [1], source


def test_time_errors_are_within_the_goals(score: TimeScore) -> None:
    """On judge rows and on all rows, with the publishers' own code modelled and without."""
    every = select_calibrated(score)
    for one in (every, every.only("judge")):
        for rows in (one, one.by_product):
            errors = summarize_groups(rows.by_source)
            assert errors is not None
            assert errors[0] <= 0.08
            assert errors[1] <= 0.25


def test_85_percent_of_rows_have_a_plan_and_no_time_prediction_fails(score: TimeScore) -> None:
    assert len(score.scored) >= 0.85 * score.num_configurations
    assert not [reason for reason in score.reasons if reason.startswith("failed")]


def test_time_figures_in_accuracy_md_are_up_to_date(score: TimeScore) -> None:
    """All figures are compared: after changing a formula, run `make accuracy` and commit the file."""
    fresh, stored = time_report(score), split_parts(DOCUMENT.read_text(encoding="utf-8"))["time"]
    changed = [line for line in fresh.splitlines() if line not in set(stored.splitlines())]
    assert not changed, f"docs/accuracy.md is not of this code; run `make accuracy`. Changed: {changed[:5]}"
    assert fresh == stored
