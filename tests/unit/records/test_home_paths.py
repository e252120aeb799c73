"""Tests of paths that begin with ``~``, for runs and traces."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import shardscope as ss
from shardscope.records.folder import checked_path

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_a_trace_is_read_from_the_home_folder(home: Path) -> None:
    shutil.copytree(FIXTURES / "trace_2_ranks", home / "trace")
    assert len(ss.Trace.load("~/trace", cache=False).ranks) == 2


def test_folders_of_runs_are_below_the_home_folder(home: Path) -> None:
    assert checked_path("launch.folder", "~/runs") == home / "runs"
    with pytest.raises(ValueError, match=f"{home}/no-run does not exist"):
        ss.Run.attach("~/no-run")


def test_a_folder_of_a_user_without_a_home_is_refused(home: Path) -> None:
    with pytest.raises(ValueError, match="that user has no home folder"):
        checked_path("launch.folder", "~nobody-here/runs")
