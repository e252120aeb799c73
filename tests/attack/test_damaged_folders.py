"""Damaged run folders: five of the thousands that `make attack` draws."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.attack.__main__ import describe
from tests.attack.fuzzing import run_tries
from tests.attack.recorded_runs import record_runs
from tests.requirements import needs, thorough

needs("torch")

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="run it on Linux: it watches /proc and makes special files"
)

NUM_FOLDERS = 5


@thorough()
def test_fault_55_damaged_run_folders_raise_only_documented_errors(tmp_path: Path) -> None:
    """Every public call answers or raises ``ValueError``, executes nothing and hides no other run."""
    record_runs(tmp_path / "recorded")
    outcomes = list(run_tries(list(range(NUM_FOLDERS)), 1, tmp_path / "recorded"))
    assert len(outcomes) == NUM_FOLDERS
    assert not [describe(outcome) for outcome in outcomes if outcome.wrong]
