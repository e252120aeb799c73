"""Where in a task the thing hangs that cannot be pickled, in the words of who wrote the task.

The task is pickled once more, slowly, by Python's own pickler, which is watched: what it was saving when it
failed is the way to the culprit, whatever classes say of their state. Each step of that way is then found
among what its owner holds, read without running anybody's code: no property, no ``__getattr__``.
"""

from __future__ import annotations

import collections
import functools
import itertools
import pickle
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardscope.runs.redaction import redact
from shardscope.validation import with_article

MAX_OBJECTS = 300_000
"""Looked at, in seconds; of what hangs behind more of them only the beginning of the way is said."""
MAX_STEPS = 40
MAX_ITEMS = 100_000
MAX_DUMPS = 8
LARGE = 1000
HIDDEN = 8
"""A pickler saves so many tuples, dicts and cells of its own between an owner and what it holds, at most."""
CONTAINERS = (dict, list, tuple, set, frozenset)
NAME = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, type)


@dataclass(frozen=True)
class Place:
    """``head`` is a name, or words after which nothing can be appended; ``tail`` is what a person types."""

    head: str
    tail: str = ""
    is_name: bool = True
    is_exact: bool = True

    def __str__(self) -> str:
        if self.is_name or not self.tail:
            return self.head + self.tail
        return f"{self.tail} of {self.head}"

    def below(self, step: str) -> Place:
        return Place(self.head, self.tail + step, self.is_name) if self.is_exact else self


def where(task: Any) -> str | None:
    """What of ``task`` cannot be pickled, and what it is; None if that cannot be found out. Never raises."""
    try:
        return _where(task)
    except Exception:
        return None


def name_of(value: Any) -> str:
    """``module.qualname`` of a function or class, or of the class of anything else; no code of its runs."""
    own = _attributes(value)
    if not _is(value, *NAME) and _is(own.get("__qualname__"), str):  # As functools.wraps leaves.
        return f"{own.get('__module__', '?')}.{own['__qualname__']}"
    named = value if _is(value, *NAME) else type(value)
    if isinstance(named, type):
        return f"{_of_type(named, '__module__')}.{_of_type(named, '__qualname__')}"
    return f"{getattr(named, '__module__', '?')}.{named.__qualname__}"


def _where(task: Any) -> str | None:
    chain, is_whole = _failing(task)
    if not chain:
        return None
    steps = list(itertools.islice(_steps(chain), MAX_STEPS))
    place, culprit = steps[-1]
    if not is_whole or culprit is not chain[-1]:
        known = itertools.takewhile(lambda step: not _pickles(step[1]), steps[:MAX_DUMPS])
        place = [steps[0][0], *(each for each, _ in known)][-1]
        return f"something in {place}"
    for (outer, holder), (inner, _) in itertools.pairwise(steps):
        rest = str(inner)[len(str(outer)) :]
        if _is_library(holder) and rest.startswith("._") and str(place).startswith(str(outer)):
            held = str(place)[len(str(outer)) + 1 :]
            return f"{outer}, {_kind(holder)} (its {held} is {_kind(culprit)}),"
    return f"{place}, {_kind(culprit)},"


def _is(value: Any, *kinds: type) -> bool:
    """As isinstance, which asks for ``__class__``; that may be a property."""
    return issubclass(type(value), kinds)


def _kind(value: Any) -> str:
    return with_article(name_of(type(value)).removeprefix("builtins."))


def _is_library(value: Any) -> bool:
    module = str(_of_type(type(value), "__module__")).partition(".")[0]
    return module in sys.stdlib_module_names and module != "builtins"


def _pickles(value: Any) -> bool:
    import cloudpickle

    try:
        cloudpickle.Pickler(_Nowhere()).dump(value)
    except Exception:
        return False
    return True


class _TooManyError(Exception):
    pass


class _Nowhere:
    def write(self, data: bytes) -> int:
        return len(data)


def _failing(task: Any) -> tuple[list[Any], bool]:
    """What was being saved when pickling failed, outermost first, and whether it was reached."""
    import cloudpickle

    reducer = cloudpickle.Pickler(_Nowhere())

    class Watched(pickle._Pickler):
        dispatch_table = reducer.dispatch_table
        num_saved = 0

        def reducer_override(self, value: Any) -> Any:
            return reducer.reducer_override(value)

        def save(self, value: Any, save_persistent_id: bool = True) -> None:
            is_large = any(type(value) is kind for kind in CONTAINERS) and len(value) > LARGE
            self.num_saved += 1 + (len(value) // 10 if is_large else 0)
            if self.num_saved > MAX_OBJECTS:
                raise _TooManyError
            if is_large and _pickles(value):  # Quickly, so that what comes after it is reached.
                return
            saving.append(value)
            try:
                super().save(value, save_persistent_id)  # type: ignore[misc]
                failed.clear()  # Whoever saved what failed had another way.
            except Exception:
                failed.extend(() if failed else saving)
                raise
            finally:
                saving.pop()

    saving: list[Any] = []
    failed: list[Any] = []
    try:
        Watched(_Nowhere(), cloudpickle.DEFAULT_PROTOCOL).dump(task)
    except (_TooManyError, RecursionError):
        return failed or [task], False
    except Exception:
        return failed, True
    return [], True


def _steps(chain: list[Any]) -> Iterator[tuple[Place, Any]]:
    """Each thing of the way that has a place in what a person wrote."""
    place, owner = Place(name_of(chain[0]).rpartition(".")[2]), chain[0]
    yield place, owner
    at = 0
    while at + 1 < len(chain):
        for hidden, child in enumerate(chain[at + 1 : at + 1 + HIDDEN]):
            found = next((there for there, held in _held(owner, place) if held is child), None)
            if found is not None:
                place, owner, at = found, child, at + 1 + hidden
                break
        else:
            if place.is_exact:
                place = Place(f"something in {place}", is_name=False, is_exact=False)
            owner, at = chain[at + 1], at + 1
            continue
        yield place, owner
    if owner is not chain[0] or at:
        yield place, owner


def _held(owner: Any, place: Place) -> Iterator[tuple[Place, Any]]:
    """What ``owner`` holds, and where it is."""
    if _is(owner, types.FunctionType):
        yield from _held_by_function(owner, place)
    elif _is(owner, types.MethodType):
        is_task = place.is_name and not place.tail
        yield Place(_short(owner.__self__)) if is_task else place.below(".__self__"), owner.__self__
        yield place, owner.__func__
    elif _is(owner, functools.partial):
        named = f"the partial of {_short(owner.func)}"
        named += "" if place.head == "partial" and not place.tail else f" ({place})"
        for name, value in owner.keywords.items():
            yield Place(f"the argument {name!r} of {named}", is_name=False), value
        for index, value in enumerate(owner.args):
            yield Place(f"the argument {index} of {named}", is_name=False), value
        yield Place(_short(owner.func)) if _is(owner.func, *NAME) else place.below(".func"), owner.func
    elif _is(owner, staticmethod, classmethod):
        yield place, owner.__func__
    elif _is(owner, property):
        yield from ((place, each) for each in (owner.fget, owner.fset, owner.fdel))
    elif _is(owner, types.CellType):
        yield from ((place, value) for _, value in _contents((owner,), ("",)))
    else:
        yield from _items(owner, place)
    if _is(owner, type):
        base = Place(_short(owner))
        yield from ((base.below(f".{name}"), value) for name, value in _of_type(owner, "__dict__").items())
        yield from ((Place(_short(each)), each) for each in _of_type(owner, "__bases__"))
    else:
        yield from ((place.below(f".{name}"), value) for name, value in _attributes(owner).items())
        yield Place(_short(type(owner))), type(owner)


def _held_by_function(owner: types.FunctionType, place: Place) -> Iterator[tuple[Place, Any]]:
    name = _short(owner)
    own = place.is_name and str(place).rpartition(".")[2] == name
    named = str(place) if own else f"{name} ({place})"
    code = owner.__code__
    for variable, value in _contents(owner.__closure__ or (), code.co_freevars):
        yield Place(f"the outer variable {variable!r} of {named}", is_name=False), value
    for variable in _names_in(code):
        if variable in owner.__globals__:
            value = owner.__globals__[variable]
            yield Place(f"the global {variable!r} that {named} uses", is_name=False), value
    defaults = owner.__defaults__ or ()
    positional = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    by_position = zip(positional, defaults, strict=True)
    for argument, value in itertools.chain(by_position, (owner.__kwdefaults__ or {}).items()):
        yield Place(f"the default of {argument!r} of {named}", is_name=False), value


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _contents(cells: tuple[types.CellType, ...], names: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(names, cells, strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # Empty: the variable has no value yet.
            continue


def _items(owner: Any, place: Place) -> Iterator[tuple[Place, Any]]:
    kind: Any
    if _is(owner, dict):
        for key, value in itertools.islice(dict.items(owner), MAX_ITEMS):
            yield place.below(f"[{_key(key)}]"), value
            yield Place(f"a key of {place}", is_name=False), key
    for kind in (set, frozenset):
        if _is(owner, kind):
            for value in itertools.islice(kind.__iter__(owner), MAX_ITEMS):
                yield Place(f"an element of {place}", is_name=False), value
    for kind in (list, tuple, collections.deque):
        if _is(owner, kind):
            fields = _class_attribute(type(owner), "_fields")
            for index, value in enumerate(itertools.islice(kind.__iter__(owner), MAX_ITEMS)):
                is_named = _is(fields, tuple) and index < len(fields) and _is(fields[index], str)
                yield place.below(f".{fields[index]}" if is_named else f"[{index}]"), value


def _key(key: Any) -> str:
    if any(type(key) is kind for kind in (str, bytes, int, float, bool, types.NoneType)):
        text = redact(repr(key))
        return text if len(text) <= 60 else f"{text[:60]}...{text[:1]}"
    return _kind(key)


def _attributes(value: Any) -> dict[str, Any]:
    """An instance's own attributes and slots, as they lie there."""
    found: dict[str, Any] = {}
    for kind in _of_type(type(value), "__mro__"):
        members = _of_type(kind, "__dict__")
        own = members.get("__dict__")
        if _is(own, types.GetSetDescriptorType) and not _is(value, type):
            found = {**own.__get__(value), **found}
        for name in members if "__slots__" in members else ():
            if _is(members[name], types.MemberDescriptorType):
                try:
                    found.setdefault(name, members[name].__get__(value))
                except AttributeError:  # Not set.
                    continue
    return found


def _class_attribute(kind: type, name: str) -> Any:
    for each in _of_type(kind, "__mro__"):
        members = _of_type(each, "__dict__")
        if name in members:
            return members[name]
    return None


def _of_type(kind: type, name: str) -> Any:
    return type.__dict__[name].__get__(kind)


def _short(value: Any) -> str:
    return name_of(value).rpartition(".")[2]
