"""About a hundred of the stored plans give the stored numbers; ``make same-numbers`` checks all of them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from tests.accuracy import same_numbers

from shardscope.timing.calibration.store import FOLDER_VARIABLE

EVERY = 45
"""Of so many stored plans, one is computed here."""
QUESTIONS = (2, 12, 18)
"""Of the searches and the advice, those that take least."""


@pytest.fixture
def stored_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    same_numbers.use_stored_calibration(tmp_path)


@pytest.fixture(scope="module")
def stored() -> list[Any]:
    return same_numbers.read_lines(same_numbers.NUMBERS)


@pytest.mark.usefixtures("stored_calibration")
def test_a_sample_of_the_stored_plans_has_the_stored_numbers(stored: list[Any]) -> None:
    frozen = same_numbers.Frozen()
    jobs = [
        (kind, index)
        for kind, index in frozen.jobs()
        if (index in QUESTIONS if kind in ("search", "advice") else index % EVERY == 0)
    ]
    assert {kind for kind, _ in jobs} == {"plan", "search", "advice", "findings", "repairs"}
    assert len([job for job in jobs if job[0] == "plan"]) > 80
    answers = [same_numbers.as_stored(frozen.answer(*job)) for job in jobs]
    assert same_numbers.check(jobs, stored, answers) == []


def test_a_number_that_differs_in_its_last_digit_is_named_with_its_plan(stored: list[Any]) -> None:
    frozen = same_numbers.Frozen()
    jobs = [job for job in frozen.jobs() if job[0] == "plan"][:3]
    answers = [copy.deepcopy(answer) for kind, index, answer in stored[1:] if (kind, index) in jobs]
    assert same_numbers.check(jobs, stored, answers) == []

    bytes_before = answers[1]["memory"]["at"]["backward"]["activations"]
    answers[1]["memory"]["at"]["backward"]["activations"] += 1
    answers[1]["step"]["seconds"] *= 1 + 4e-16
    (text,) = same_numbers.check(jobs, stored, answers)
    title, *lines = text.splitlines()
    assert title == frozen.name("plan", 1)
    expected = f"memory.at.backward.activations: {bytes_before} before, {bytes_before + 1} now"
    assert lines[0].strip() == expected
    assert lines[1].strip().startswith("step.seconds: ")


def test_where_sums_round_differently_only_the_last_digits_may_differ() -> None:
    before = {"seconds": 0.1, "bytes": 7, "stages": ["#aaaaaaaaaaaa"]}
    rounded = {"seconds": 0.1 + 1e-16, "bytes": 7, "stages": ["#bbbbbbbbbbbb"]}
    assert len(list(same_numbers.differences(before, rounded))) == 2
    assert not list(same_numbers.differences(before, rounded, is_exact=False))
    other = {"seconds": 0.1001, "bytes": 8, "stages": ["#bbbbbbbbbbbb"]}
    assert len(list(same_numbers.differences(before, other, is_exact=False))) == 2
