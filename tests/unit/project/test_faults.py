"""Tests of the list of faults: each has a test or a reason for none, and docs/reliability.md lists both."""

from __future__ import annotations

from tests import faults
from tests.fault_table import FAULTS, HEADINGS


def test_reliability_md_is_up_to_date() -> None:
    stored = faults.DOCUMENT.read_text(encoding="utf-8")
    assert stored == faults.build_document(), "stale: run `python -m tests.faults`"


def test_every_fault_has_a_test_or_a_reason() -> None:
    tested = {number for test in faults.list_fault_tests() for number in test.numbers}
    assert tested <= set(FAULTS)
    assert not [number for number in FAULTS if number not in tested and not FAULTS[number].untested]
    assert list(FAULTS) == sorted(FAULTS) and set(HEADINGS) <= set(FAULTS)
