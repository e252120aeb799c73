"""Temporary replacement of library attributes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from inspect import getattr_static
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
Patch = tuple[object, str, object]
"""A module or class, the name of its attribute, and the stand-in for it."""
CallContext = Callable[[Sequence[object]], AbstractContextManager[object]]
"""Function from a call's positional arguments, ``self`` first, to the context that the method runs in."""


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


@contextlib.contextmanager
def methods_in_context(owner: type, names: Sequence[str], find_context: CallContext) -> Iterator[None]:
    """Run each call of these methods of ``owner`` in the context that ``find_context`` returns for it."""

    def wrap_method(original: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(original)
        def call_in_context(*args: P.args, **kwargs: P.kwargs) -> R:
            with find_context(args):
                return original(*args, **kwargs)

        return call_in_context

    with patch_attributes([(owner, name, wrap_method(getattr(owner, name))) for name in names]):
        yield
