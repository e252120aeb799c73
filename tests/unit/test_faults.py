"""Every fault has a test with its number or says why it has none, and docs/reliability.md tells both."""

from __future__ import annotations

import pytest
from tests import faults
from tests.fault_words import FAULTS, ROOMS


def test_the_document_is_the_one_of_these_tests() -> None:
    stored = faults.DOCUMENT.read_text(encoding="utf-8")
    assert stored == faults.document(), "stale: run `python -m tests.faults`"


@pytest.mark.parametrize("number", FAULTS)
def test_every_number_has_a_test_or_a_reason(number: int) -> None:
    found = [test for test in faults.fault_tests() if number in test.numbers]
    assert found or FAULTS[number].untested


def test_numbers_are_those_of_the_list() -> None:
    assert list(FAULTS) == sorted(FAULTS)
    assert set(range(1, 49)) | {62, 63, 64} <= set(FAULTS) <= set(range(1, 65))
    assert set(ROOMS) <= set(FAULTS)
    tests = list(faults.fault_tests())
    assert {number for test in tests for number in test.numbers} <= set(FAULTS)
    assert len({(test.file, test.what) for test in tests}) == len(tests)
