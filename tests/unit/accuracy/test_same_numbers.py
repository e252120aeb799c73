"""Test of about a hundred stored plans against stored numbers; ``make same-numbers`` checks all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.accuracy import same_numbers

from shardscope.timing.calibration.files import FOLDER_VARIABLE

EVERY = 45
"""One in so many stored plans is computed here."""
QUESTIONS = (2, 12, 18)
"""The fastest searches and advice."""


def test_sampled_plans_have_the_stored_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    same_numbers.use_stored_calibration(tmp_path)
    stored = same_numbers.read_lines(same_numbers.NUMBERS)
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

    # The check reports the plan and a number that differs by one byte.
    first = next(number for number, job in enumerate(jobs) if job[0] == "plan")
    activations = answers[first]["memory"]["at"]["backward"]["activations"]
    answers[first]["memory"]["at"]["backward"]["activations"] += 1
    (difference,) = same_numbers.check(jobs, stored, answers)
    assert difference.startswith(frozen.name(*jobs[first])) and str(activations + 1) in difference
