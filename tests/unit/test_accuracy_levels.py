"""The levels that docs/accuracy.md reached hold: a formula that worsens them fails here, in seconds."""

from __future__ import annotations

from statistics import median

import pytest
from tests.accuracy.kinds import kind
from tests.accuracy.rows import MEASURED, ROOT, read
from tests.accuracy.scoring import MemoryScore, absolute, overall_line, percentile, score_memory

REPORT = ROOT / "docs" / "accuracy.md"

# Source and kind -> the median of absolute errors that was reached, in percent, and a little room.
MEDIANS = {
    ("FMS-acceleration", "allocated"): 2.0,
    ("Zero Bubble", "unknown"): 2.5,
    ("Megatron-Bridge", "allocated"): 3.9,
    ("nanotron", "reserved"): 12.5,
    ("Qwen", "unknown"): 26.0,
    ("BLOOM", "nvidia-smi"): 12.0,
    ("torchtitan", "reserved"): 16.5,
}


@pytest.fixture(scope="module")
def score() -> MemoryScore:
    return score_memory(read(sorted(path for path in MEASURED.glob("*.jsonl") if path.name != "own.jsonl")))


@pytest.mark.parametrize(("group", "percent"), MEDIANS.items(), ids=[name for name, _ in MEDIANS])
def test_medians_are_no_worse(score: MemoryScore, group: tuple[str, str], percent: float) -> None:
    rows = [
        row
        for (name, what), some in score.groups.items()
        if group[0] in name and what == group[1]
        for row in some
    ]
    assert rows
    assert 100 * median(absolute(rows)) <= percent


def test_most_rows_of_known_frameworks_have_a_plan(score: MemoryScore) -> None:
    foreign = sum(reason.endswith("schedule is not modelled") for _, reason in score.unmapped)
    assert score.num_rows - len(score.unmapped) >= 0.88 * (score.num_rows - foreign)


def test_no_row_makes_a_prediction_fail(score: MemoryScore) -> None:
    assert not [reason for _, reason in score.unmapped if reason.startswith("failed")]


def test_fits_or_not_is_right(score: MemoryScore) -> None:
    right = sum(fit.ran == fit.predicted for fit in score.fits)
    assert len(score.fits) > 200
    assert right >= 0.98 * len(score.fits)


def test_nine_of_ten_allocated_rows_are_close(score: MemoryScore) -> None:
    errors = sorted(abs(row.error) for row in score.scored if kind(row.mapped.row) == "allocated")
    assert len(errors) > 50
    assert percentile(errors, 0.9) <= 0.05


@pytest.mark.parametrize(("what", "share", "width"), [("reserved", 0.9, 1.6), ("nvidia-smi", 0.8, 1.3)])
def test_bands_hold_most_rows_and_are_no_wider_than_they_were(
    score: MemoryScore, what: str, share: float, width: float
) -> None:
    rows = [row for row in score.scored if kind(row.mapped.row) == what]
    assert sum(row.inside for row in rows) >= share * len(rows)
    assert median(row.predicted.high / row.predicted.low for row in rows) <= width


def test_the_report_is_that_of_these_rows(score: MemoryScore) -> None:
    """Every source is in it; its figures follow the formulas with `make accuracy`."""
    text = REPORT.read_text(encoding="utf-8")
    for name, what in score.groups:
        assert f"| {name} | {what} |" in text
    assert overall_line(score).startswith("overall memory: ")
