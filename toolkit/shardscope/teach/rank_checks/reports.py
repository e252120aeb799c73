"""Reports of the ranks: one file each, which the notebook reads."""

from __future__ import annotations

from pathlib import Path

CALL_SECONDS = 15.0
"""Most seconds of one call of the learner's code on a rank, before it counts as deadlocked."""


def report_path(folder: Path, rank: int) -> Path:
    """Return the file that one rank reports in."""
    return folder / f"answer_{rank}.json"
