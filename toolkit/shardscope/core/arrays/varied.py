"""Several nouns of one type, read as formulas read one."""

from __future__ import annotations

from types import FunctionType
from typing import Any


class Varied:
    """Several nouns of one type as formulas read one: what differs are columns, the rest is ``like``'s.

    Its properties and methods are the type's own, over the columns.
    """

    def __init__(self, kind: type, like: Any = None, /, **differing: Any) -> None:
        self.__dict__.update(differing)
        self._kind, self._like = kind, like

    def __getattr__(self, name: str) -> Any:
        told = getattr(self._kind, name, None)
        if isinstance(told, property):
            assert told.fget is not None
            found = told.fget(self)
        elif isinstance(told, FunctionType):
            found = told.__get__(self)
        else:
            found = getattr(self._like, name)
        self.__dict__[name] = found
        return found
