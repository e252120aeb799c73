"""A stand-in for many objects of one type (recipes, layouts) in formulas that are written for one."""

from __future__ import annotations

from types import FunctionType
from typing import Any


class ObjectBatch:
    """Many objects of one type: attributes that differ are columns, all others are those of ``like``.

    Properties and methods are those of the type, evaluated on the columns.
    """

    def __init__(self, kind: type, like: Any = None, /, **differing: Any) -> None:
        self.__dict__.update(differing)
        self._kind, self._like = kind, like

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._kind, name, None)
        if isinstance(member, property):
            assert member.fget is not None
            value = member.fget(self)
        elif isinstance(member, FunctionType):
            value = member.__get__(self)
        else:
            value = getattr(self._like, name)
        self.__dict__[name] = value
        return value
