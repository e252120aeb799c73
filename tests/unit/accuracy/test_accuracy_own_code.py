"""Tests of modelled code of publishers (``own_code``): each piece explains its calibration rows."""

from __future__ import annotations

from statistics import median

import pytest
from tests.accuracy.ablation import score_without
from tests.accuracy.own_code import OwnCode
from tests.accuracy.rows import MEASURED, read
from tests.accuracy.scoring import Scored, score_memory


@pytest.fixture(scope="module")
def calibration() -> list[Scored]:
    """Return the calibration rows: judge rows must not be used to choose the pieces."""
    rows = [row for row in read(sorted(MEASURED.glob("*.jsonl"))) if row.get("role") == "calibration"]
    return list(score_memory(rows).scored)


@pytest.mark.parametrize(
    ("name", "with_it", "without_it"),
    [
        ("bf16_optimizer", 0.11, 0.2),
        ("fsdp1_hooks", 0.02, 0.06),
        ("no_buckets", 0.001, 0.015),
        ("rotary_caches", 0.02, 0.035),
        ("unsloth_loss", 0.01, 0.3),
    ],
)
def test_each_piece_of_own_code_reduces_the_median_error(
    calibration: list[Scored], name: OwnCode, with_it: float, without_it: float
) -> None:
    """The median error is small with all pieces and large without this one."""
    ablations = score_without(name, calibration)
    assert ablations
    assert median(one.with_error for one in ablations) <= with_it
    assert median(one.without_error for one in ablations) >= without_it
