"""Tests of formatting rates, prices and durations, and of parsing token budgets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardscope.core.number_format import Scale, format_error
from shardscope.timing.report import format_seconds
from shardscope_widgets.kit.numbers import (
    Unit,
    format_dollars,
    format_duration,
    format_short,
    format_three_digits,
    parse_tokens,
)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (412.4, "412"),
        (41.24, "41.2"),
        (4.124, "4.12"),
        (0.4124, "0.41"),
        (0.0041, "0.0041"),
        (3.94e-5, "0.000039"),
        (0, "0"),
    ],
)
def test_numbers_are_formatted_with_three_digits(value: float, expected: str) -> None:
    assert format_three_digits(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (7_940, "7.94k"),
        (999.6, "1.00k"),
        (1.2e6, "1.20M"),
        (412, "412"),
        (15e12, "15.0T"),
        (999_600, "1.00M"),
    ],
)
def test_large_numbers_are_formatted_with_a_unit_suffix(value: float, expected: str) -> None:
    assert format_short(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0996, "$0.10"),
        (0.094, "$0.094"),
        (0.0041, "$0.0041"),
        (1.234, "$1.23"),
        (1493, "$1,493"),
        (2e6, "$2.00M"),
    ],
)
def test_prices_are_formatted_with_cents(value: float, expected: str) -> None:
    assert format_dollars(value) == expected


@pytest.mark.parametrize(
    ("days", "expected"),
    [(0.01, "14.4 minutes"), (0.5, "12.0 hours"), (3, "3.00 days"), (1460, "4.00 years")],
)
def test_durations_are_formatted_in_a_suitable_unit(days: float, expected: str) -> None:
    assert format_duration(days) == expected


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("15T", 15e12),
        ("300 B", 300e9),
        ("1.5e12", 1.5e12),
        ("1,000,000", 1e6),
        ("40k tokens", 40e3),
        ("2m", 2e6),
    ],
)
def test_parses_common_notations_of_token_budgets(text: str, tokens: float) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "T", "-5B", "nan", "inf", "1.2.3", "15X", "0", "1e30", "15e", "9" * 40])
def test_rejects_invalid_token_budget(text: str) -> None:
    with pytest.raises(ValueError, match=r"num_tokens is .* allowed: .* Nearest fix: "):
        parse_tokens(text)


@given(st.text(max_size=12))
def test_any_text_parses_as_a_token_budget_or_raises_value_error(text: str) -> None:
    try:
        assert 1 <= parse_tokens(text) <= 1e18
    except ValueError as error:
        assert "Nearest fix" in str(error)


@given(st.floats(1e-6, 1e4))
def test_time_scale_keeps_three_significant_digits(seconds: float) -> None:
    scale = Scale.for_seconds(seconds)
    parsed = float(scale.format(seconds).replace(",", "")) / scale.factor
    assert parsed == pytest.approx(seconds, rel=0.006)


@pytest.mark.parametrize("seconds", [0.0123, 0.9994, 0.9996, 3.863, 12.3])
def test_every_view_shows_a_step_in_the_same_unit(seconds: float) -> None:
    """The Time tab said 3,863 ms where Plans said 3.86 s."""
    assert Scale.for_seconds(seconds).format_with_unit(seconds) == format_seconds(seconds)


@pytest.mark.parametrize(
    ("seconds", "unit", "texts"),
    [
        ([32.1e-3, 57.8e-6], "µs", ["32,100", "57.8"]),
        ([0.0064, 0.0451], "ms", ["6.40", "45.1"]),
        ([3.86, 0.163, 0.0], "s", ["3.86", "0.16", "0"]),
    ],
)
def test_a_column_has_one_unit_in_which_no_number_rounds_to_zero(
    seconds: list[float], unit: str, texts: list[str]
) -> None:
    scale = Scale.for_column(seconds)
    assert scale.unit == unit and [scale.format(one) for one in seconds] == texts


def test_a_column_of_sizes_has_the_unit_of_the_smallest() -> None:
    assert Unit.for_column([3 * 2**30, 2**20]).name == "MiB"
    assert Unit.for_column([3 * 2**30, 2**29]).name == "GiB"
    assert Unit.for_column([0, 512]).name == "KiB"


def test_an_error_that_rounds_to_zero_has_no_sign() -> None:
    """The comparison of runs wrote "+0 %" where prediction and measurement were equal."""
    shown = [format_error(share) for share in (0.0, 0.0004, -0.0004, 0.124, -0.031)]
    assert shown == ["0 %", "0 %", "0 %", "+12 %", "-3 %"]
