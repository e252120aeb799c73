"""Temporary replacement of library attributes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any


@contextlib.contextmanager
def replaced(stand_ins: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set ``owner.name`` to ``stand_in`` for each entry, and restore the originals on exit."""
    before = [getattr(owner, name) for owner, name, _ in stand_ins]
    for owner, name, stand_in in stand_ins:
        setattr(owner, name, stand_in)
    try:
        yield
    finally:
        for (owner, name, _), was in zip(stand_ins, before, strict=True):
            setattr(owner, name, was)
