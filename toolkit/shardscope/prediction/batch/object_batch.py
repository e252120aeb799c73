"""A stand-in for many objects of one type (recipes, layouts) in formulas that are written for one."""

from __future__ import annotations

from types import FunctionType
from typing import TypeVar, cast

T = TypeVar("T")


def build_batch(kind: type[T], like: T | None = None, /, **differing: object) -> T:
    """Return many objects of type ``kind`` as one: attributes that differ are columns.

    All other attributes are those of ``like``. Properties and methods are those of ``kind``, evaluated on the
    columns. The result is typed as one object, because formulas are: a column stands for a number.
    """
    return cast("T", ObjectBatch(kind, like, differing))


class ObjectBatch:
    """The objects that :func:`build_batch` returns."""

    def __init__(self, kind: type, like: object, differing: dict[str, object]) -> None:
        self.__dict__.update(differing)
        self._kind, self._like = kind, like

    def __getattr__(self, name: str) -> object:
        # Called on the first access of an attribute only: its value is stored in __dict__, so that columns
        # derived by a property are computed once.
        member = getattr(self._kind, name, None)
        value: object
        if isinstance(member, property):
            assert member.fget is not None
            value = member.fget(self)
        elif isinstance(member, FunctionType):
            # Not stored: a bound method refers to this object, which would be freed, with its columns, by the
            # garbage collector only.
            return member.__get__(self)
        else:
            value = getattr(self._like, name)
        self.__dict__[name] = value
        return value
