"""Imports by other packages that are delayed until the imported module is used."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from types import ModuleType


@contextmanager
def delay_import(name: str) -> Iterator[None]:
    """Load the top-level module ``name``, if it is imported in this context, when it is first used.

    A module that is already loaded, or not installed, is not affected.
    """
    finder = _LazyFinder(name)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _LazyFinder(MetaPathFinder):
    """A finder of one module, which is loaded at the first access to one of its attributes."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the specification of the module with a lazy loader; None for all other modules."""
        spec = PathFinder.find_spec(fullname, path, target) if fullname == self._name else None
        if spec is not None and spec.loader is not None:
            spec.loader = LazyLoader(spec.loader)
        return spec
