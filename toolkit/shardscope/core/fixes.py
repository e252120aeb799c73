"""A refusal names a fix that holds: once its changes are made, nothing of the noun is refused any more.

Each check knows its own field and says what would mend that. Whether the rest can live with it shows only by
trying. So a noun that is refused tries its fix here, goes on where that is refused in turn, and names all
changes that it took. Words that are no changes (``pip install ...``) stay as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass, replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from shardscope.core.errors import FieldError, known_keys

Noun = TypeVar("Noun")
P = ParamSpec("P")
R = TypeVar("R")

MAX_TRIES = 100
"""Nouns made in search of one fix: some milliseconds, which a person does not notice."""

_seeking: ContextVar[bool] = ContextVar("_seeking", default=True)


@contextmanager
def as_it_is() -> Iterator[None]:
    """Inside, refusals keep the fix of the check that refused: for whoever only asks whether it runs."""
    token = _seeking.set(False)
    try:
        yield
    finally:
        _seeking.reset(token)


def checked(noun: type[Noun]) -> type[Noun]:
    """Class decorator over ``@dataclass``: fixes hold, and unknown keywords are refused with the nearest.

    What the noun raises is its own ``FieldError`` with such a fix, or one that names the keyword.
    """
    names = _fields(noun)
    owner = [kind.__name__ for kind in noun.__mro__ if is_dataclass(kind)][-1]
    make = noun.__init__

    @wraps(make)
    def initialise(self: Noun, *args: Any, **values: Any) -> None:
        if not names.keys() >= values.keys():
            known_keys(owner, values, names)
        try:
            make(self, *args, **values)
        except FieldError as refusal:
            if not _seeking.get():
                raise
            changes = find_whole_fix(self, refusal)
            if changes is None:
                raise
            raise refusal.with_fix(changes) from None

    noun.__init__ = initialise  # type: ignore[assignment]
    return noun


def known_arguments(make: Callable[P, R]) -> Callable[P, R]:
    """Decorator of a factory: a keyword that it does not have is refused with the nearest that it has."""
    parameters = inspect.signature(make).parameters.values()
    names = [parameter.name for parameter in parameters]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return make  # What it makes of them knows their names.

    @wraps(make)
    def called(*args: P.args, **values: P.kwargs) -> R:
        known_keys(make.__qualname__, values, names)
        return make(*args, **values)

    return called


def find_whole_fix(noun: Any, refusal: FieldError) -> dict[str, Any] | None:
    """Return the changes after which ``noun``, whose making ``refusal`` ended, is refused nothing.

    None of them could be left out. None if the refusal's own fix is enough, if it is words, or if no changes
    were found.
    """
    own = refusal.fix_values
    if own is None:
        return None
    with as_it_is():
        search = _Search(noun)
        found = search.from_here({}, own)
        for name in list(found or ()):
            fewer = {key: value for key, value in (found or {}).items() if key != name}
            if fewer and name != "layout" and search.refusal(fewer) is None:
                found = fewer
    return None if found == own else found


def find_changes(refusal: FieldError) -> dict[str, object]:
    """Return what ``refusal.fix`` would change, as :attr:`FieldError.changes` has it."""
    if refusal.field.endswith(" key"):
        return {}  # The fix is another key, not another value.
    owner = refusal.field.removeprefix("Layout ").rpartition(".")[0]
    owner = "Layout" if refusal.field.startswith("Layout ") else owner
    changes: dict[str, object] = {}
    for name, value in (refusal.fix_values or {}).items():
        if name == "layout":
            from shardscope.core.layout import Layout  # layout.py imports this module.

            changes["Layout"] = getattr(Layout, value)()
        else:
            noun = owner if name in refusal.refused else _owner(name) or owner
            changes[f"{noun}.{name}" if noun else name] = value
    return changes


def _owner(name: str) -> str:
    """Return the noun whose field a fix names, of those that are refused together in a plan."""
    from shardscope.core.layout import Layout  # layout.py imports this module.
    from shardscope.core.recipe import Recipe

    if name in _fields(Recipe):
        return "Recipe"
    is_of_a_layout = any(name in _fields(one) for one in Layout.__subclasses__())
    return "Layout" if is_of_a_layout else ""


class _Search:
    """Which changes were tried on a noun, each set of them once: fixes may lead in a circle."""

    def __init__(self, noun: Any) -> None:
        self._noun = noun
        self._tried: set[str] = set()

    def from_here(self, before: Mapping[str, Any], step: Mapping[str, Any]) -> dict[str, Any] | None:
        """``before``, then ``step``, then what is asked for in turn, until nothing is refused; or None."""
        if "layout" in step:
            own = _fields(self._noun.recipe)
            before = {name: value for name, value in before.items() if name in own}
        changes = {**before, **step}
        key = repr(sorted(changes.items()))
        if key in self._tried or len(self._tried) >= MAX_TRIES:
            return None
        self._tried.add(key)
        refusal = self.refusal(changes)
        if refusal is None:
            return changes
        for following in self._steps(refusal):
            found = self.from_here(changes, following)
            if found is not None:
                return found
        return None

    def refusal(self, changes: Mapping[str, Any]) -> FieldError | None:
        """Why the noun cannot be made with ``changes``; None if it can."""
        try:
            _remade(self._noun, changes)
        except FieldError as refusal:
            return refusal
        return None

    def _steps(self, refusal: FieldError) -> Iterator[dict[str, Any]]:
        """What the refusal itself names; where that leads nowhere, the plain values of its fields."""
        if refusal.fix_values is not None:
            yield refusal.fix_values
        plain = {name: field.default for part in _parts(self._noun) for name, field in _fields(part).items()}
        back = {name: plain[name] for name in refusal.refused if name in plain}
        if back:
            yield back


def _parts(noun: Any) -> tuple[Any, ...]:
    """The nouns whose fields a fix may change: a plan's recipe and layout, or the noun itself."""
    return (noun.recipe, noun.layout) if hasattr(noun, "recipe") else (noun,)


def _remade(noun: Any, changes: Mapping[str, Any]) -> Any:
    if not hasattr(noun, "recipe"):
        return replace(noun, **changes)
    recipe, layout = noun.recipe, noun.layout
    rest = dict(changes)
    if "layout" in rest:
        layout = getattr(type(layout), rest.pop("layout"))()
    mine = {name: rest.pop(name) for name in list(rest) if name in _fields(recipe)}
    return replace(noun, recipe=replace(recipe, **mine), layout=replace(layout, **rest))


def _fields(noun: Any) -> dict[str, Any]:
    return {field.name: field for field in fields(noun) if field.init}
