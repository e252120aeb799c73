"""Temporary replacement of library attributes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from inspect import getattr_static

Patch = tuple[object, str, object]
"""A module or class, the name of its attribute, and the stand-in for it."""


@contextlib.contextmanager
def patch_attributes(stand_ins: Sequence[Patch]) -> Iterator[None]:
    """Set ``owner.name`` to ``stand_in`` for each entry, and restore the originals on exit."""
    # getattr would turn a class's static method into a plain function, and restore that.
    originals = [getattr_static(owner, name) for owner, name, _ in stand_ins]
    for owner, name, stand_in in stand_ins:
        setattr(owner, name, stand_in)
    try:
        yield
    finally:
        for (owner, name, _), original in zip(stand_ins, originals, strict=True):
            setattr(owner, name, original)
