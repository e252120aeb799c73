"""Imports by other packages that are delayed until the imported module is used."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType


@contextmanager
def delay_import(name: str) -> Iterator[None]:
    """In this context, give importers of the top-level module ``name`` one that loads it at its first use.

    A module that is already loaded, or not installed, is not affected. Afterwards ``import`` works as before.
    """
    if name in sys.modules or find_spec(name) is None:
        yield
        return
    sys.modules[name] = delayed = _DelayedModule(name)
    try:
        yield
    finally:
        delayed.leave_modules()


class _DelayedModule(ModuleType):
    """A module whose attributes are those of the real one, which is imported at the first access.

    ``importlib.util.LazyLoader`` is not used: before Python 3.12.3, threads that use its module at the same
    time fail, and it stays in ``sys.modules``.
    """

    def __getattr__(self, attribute: str) -> object:
        self.leave_modules()
        return getattr(import_module(self.__name__), attribute)

    def leave_modules(self) -> None:
        """Leave ``sys.modules``, so that the next import finds the real module."""
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
