"""The text of a file in ``front_end``."""

from __future__ import annotations

from importlib.resources import files


def front_end_text(name: str) -> str:
    """The text, not the path: a file-backed front end keeps every instance alive (anywidget#929)."""
    return (files(__package__) / "front_end" / name).read_text(encoding="utf-8")
