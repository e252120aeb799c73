"""Tests of number formats."""

from __future__ import annotations

import pytest

from shardscope.core.number_format import format_number


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (0.40404, "0.404"),
        (2.0, "2"),
        (16.66, "16.7"),
        (999.96, "1,000"),
        (1130.4, "1,130"),
        (-1e6, "-1,000,000"),
    ],
)
def test_large_numbers_have_no_exponent(value: float, shown: str) -> None:
    assert format_number(value) == shown
