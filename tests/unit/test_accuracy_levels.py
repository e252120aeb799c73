"""The levels that docs/accuracy.md reached hold: a formula that worsens them fails here, in seconds."""

from __future__ import annotations

from statistics import median

import pytest
from tests.accuracy.kinds import kind
from tests.accuracy.rows import MEASURED, ROOT, read
from tests.accuracy.scoring import MemoryScore, absolute, overall_line, score_memory

REPORT = ROOT / "docs" / "accuracy.md"

# Source and kind -> the median of absolute errors that was reached, in percent, and a little room.
MEDIANS = {
    ("FMS-acceleration", "allocated"): 3.5,
    ("Zero Bubble", "unknown"): 2.5,
    ("Megatron-Bridge", "allocated"): 8.5,
    ("nanotron", "allocated"): 8.0,
    ("BLOOM", "nvidia-smi"): 17.0,
    ("torchtitan", "reserved"): 16.0,
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
    assert score.num_rows - len(score.unmapped) >= 0.78 * (score.num_rows - foreign)


def test_no_row_makes_a_prediction_fail(score: MemoryScore) -> None:
    assert not [reason for _, reason in score.unmapped if reason.startswith("failed")]


def test_fits_or_not_is_right(score: MemoryScore) -> None:
    right = sum(fit.ran == fit.predicted for fit in score.fits)
    assert len(score.fits) > 200
    assert right >= 0.98 * len(score.fits)


def test_half_of_what_nvidia_smi_shows_lies_in_the_band(score: MemoryScore) -> None:
    rows = [row for row in score.scored if kind(row.mapped.row) == "nvidia-smi"]
    assert sum(row.inside for row in rows) >= 0.5 * len(rows)


def test_the_report_is_that_of_these_rows(score: MemoryScore) -> None:
    """Every source is in it; its figures follow the formulas with `make accuracy`."""
    text = REPORT.read_text(encoding="utf-8")
    for name, what in score.groups:
        assert f"| {name} | {what} |" in text
    assert overall_line(score).startswith("overall memory: ")
