"""Attributes of libraries that are others for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any


@contextlib.contextmanager
def replaced(stand_ins: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Each ``(owner, name, stand_in)`` in its place while this lasts; afterwards all is as it was."""
    before = [getattr(owner, name) for owner, name, _ in stand_ins]
    for owner, name, stand_in in stand_ins:
        setattr(owner, name, stand_in)
    try:
        yield
    finally:
        for (owner, name, _), was in zip(stand_ins, before, strict=True):
            setattr(owner, name, was)
