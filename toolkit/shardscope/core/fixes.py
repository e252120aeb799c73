"""Search for complete fixes of validation errors: changes after which the whole object is valid.

Each check knows only its own field and suggests a fix for that. Whether the fix is valid with all other
fields shows only by constructing the object. So the search applies the fix, constructs the object, follows
the next error's fix if there is one, and reports all changes together. Text fixes (``pip install ...``) are
left unchanged.
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
"""Most constructions in the search for one fix: some milliseconds."""

_seeking: ContextVar[bool] = ContextVar("_seeking", default=True)


@contextmanager
def as_it_is() -> Iterator[None]:
    """Disable the search inside the context, for callers that only test whether a combination is valid."""
    token = _seeking.set(False)
    try:
        yield
    finally:
        _seeking.reset(token)


def checked(noun: type[Noun]) -> type[Noun]:
    """Decorate a dataclass so that its errors have complete fixes and unknown keywords name the nearest
    field.

    The constructor raises the original ``FieldError`` with the complete fix, or one for the unknown keyword.
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
    """Decorate a factory so that unknown keywords raise ``ValueError`` with the nearest known one."""
    parameters = inspect.signature(make).parameters.values()
    names = [parameter.name for parameter in parameters]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return make  # its **options are checked by the class that receives them

    @wraps(make)
    def called(*args: P.args, **values: P.kwargs) -> R:
        known_keys(make.__qualname__, values, names)
        return make(*args, **values)

    return called


def find_whole_fix(noun: Any, refusal: FieldError) -> dict[str, Any] | None:
    """Return a minimal set of changes that makes ``noun``, whose constructor raised ``refusal``, valid.

    Return None if the error's own fix is enough, if it is text, or if the search finds nothing.
    """
    own = refusal.fix_values
    if own is None:
        return None
    with as_it_is():
        search = _Search(noun)
        found = search.from_here({}, own)
        # Drop each change that is not needed: later steps may have made earlier ones redundant.
        for name in list(found or ()):
            fewer = {key: value for key, value in (found or {}).items() if key != name}
            if fewer and name != "layout" and search.refusal(fewer) is None:
                found = fewer
    return None if found == own else found


def find_changes(refusal: FieldError) -> dict[str, object]:
    """Return the changes of ``refusal.fix``; see :attr:`FieldError.changes`."""
    if refusal.field.endswith(" key"):
        return {}  # the fix is another key, not another value
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
    """Return the class, "Recipe" or "Layout", that has the field ``name``; empty if neither has it."""
    from shardscope.core.layout import Layout  # layout.py imports this module.
    from shardscope.core.recipe import Recipe

    if name in _fields(Recipe):
        return "Recipe"
    is_of_a_layout = any(name in _fields(one) for one in Layout.__subclasses__())
    return "Layout" if is_of_a_layout else ""


class _Search:
    """Depth-first search over sets of changes, each tried once because fixes may form a cycle."""

    def __init__(self, noun: Any) -> None:
        self._noun = noun
        self._tried: set[str] = set()

    def from_here(self, before: Mapping[str, Any], step: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return ``before`` and ``step`` with all changes that further errors suggest; None if invalid."""
        # A new layout class has other fields: earlier changes of layout fields no longer apply.
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
        """Return the error of constructing the object with ``changes``; None if it is valid."""
        try:
            _remade(self._noun, changes)
        except FieldError as refusal:
            return refusal
        return None

    def _steps(self, refusal: FieldError) -> Iterator[dict[str, Any]]:
        """Yield the changes to try next: the error's own fix, then the default values of its fields."""
        if refusal.fix_values is not None:
            yield refusal.fix_values
        plain = {name: field.default for part in _parts(self._noun) for name, field in _fields(part).items()}
        back = {name: plain[name] for name in refusal.refused if name in plain}
        if back:
            yield back


def _parts(noun: Any) -> tuple[Any, ...]:
    """Return the objects whose fields a fix may change: a plan's recipe and layout, or the object itself."""
    return (noun.recipe, noun.layout) if hasattr(noun, "recipe") else (noun,)


def _remade(noun: Any, changes: Mapping[str, Any]) -> Any:
    if not hasattr(noun, "recipe"):
        return replace(noun, **changes)
    recipe, layout = noun.recipe, noun.layout
    # Apply the new layout class first, then field changes to the object that has the field.
    rest = dict(changes)
    if "layout" in rest:
        layout = getattr(type(layout), rest.pop("layout"))()
    mine = {name: rest.pop(name) for name in list(rest) if name in _fields(recipe)}
    return replace(noun, recipe=replace(recipe, **mine), layout=replace(layout, **rest))


def _fields(noun: Any) -> dict[str, Any]:
    return {field.name: field for field in fields(noun) if field.init}
