"""Fixtures of unit tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardscope.records.folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run's folder with nothing in it yet."""
    made = RunFolder(tmp_path / "run")
    made.create()
    return made
