"""Tests of macOS, Windows and Pyodide, each simulated in a child process (``other_system.py``)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.requirements import sample

REPOSITORY = Path(__file__).parents[3]


@sample(2)
@pytest.mark.parametrize(
    ("platform", "name"), [("win32", "Windows"), ("darwin", "macOS"), ("emscripten", "Pyodide")]
)
def test_planner_views_traces_and_saved_runs_work_without_linux(
    platform: str, name: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.project.other_system", platform, name],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, sys.path)])},
    )
    assert done.returncode == 0, done.stderr
