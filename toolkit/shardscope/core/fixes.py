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
from dataclasses import Field, fields, is_dataclass
from functools import wraps
from typing import TYPE_CHECKING, Generic, ParamSpec, TypeVar

from shardscope.core.errors import FieldError, check_keys
from shardscope.core.serialization import replace_fields

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from shardscope.core.layout import Layout

T = TypeVar("T", bound="DataclassInstance")
P = ParamSpec("P")
R = TypeVar("R")

MAX_TRIES = 100
"""Most constructions in the search for one fix: some milliseconds."""

_is_search_enabled: ContextVar[bool] = ContextVar("_is_search_enabled", default=True)


@contextmanager
def without_fix_search() -> Iterator[None]:
    """Disable the search inside the context, for callers that only test whether a combination is valid."""
    token = _is_search_enabled.set(False)
    try:
        yield
    finally:
        _is_search_enabled.reset(token)


def suggest_complete_fixes(kind: type[T]) -> type[T]:
    """Decorate a dataclass so that its errors have complete fixes and unknown keywords name the nearest
    field.

    The constructor raises the original ``FieldError`` with the complete fix, or one for the unknown keyword.
    """
    names = _get_init_fields(kind)
    # The topmost dataclass: errors name a field of any framework's layout as "Layout.tp".
    owner = [base.__name__ for base in kind.__mro__ if is_dataclass(base)][-1]
    initialize = kind.__init__

    @wraps(initialize)
    def initialize_with_fixes(self: T, *args: object, **values: object) -> None:
        # Before the generated __init__, whose TypeError would not suggest the nearest field.
        if not names.keys() >= values.keys():
            check_keys(owner, values, names)
        try:
            initialize(self, *args, **values)
        except FieldError as error:
            if not _is_search_enabled.get():
                raise
            changes = find_complete_fix(self, error)
            if changes is None:
                raise
            raise error.with_fix(changes) from None

    kind.__init__ = initialize_with_fixes  # type: ignore[method-assign, assignment]
    return kind


def refuse_unknown_keywords(kind: type[T]) -> type[T]:
    """Decorate a dataclass so that unknown keywords raise ``ValueError`` with the nearest known one."""
    names = _get_init_fields(kind)
    initialize = kind.__init__

    @wraps(initialize)
    def initialize_checked(self: T, *args: object, **values: object) -> None:
        check_keys(kind.__name__, values, names)
        initialize(self, *args, **values)

    kind.__init__ = initialize_checked  # type: ignore[method-assign, assignment]
    return kind


def check_keywords(create: Callable[P, R]) -> Callable[P, R]:
    """Decorate a factory so that unknown keywords raise ``ValueError`` with the nearest known one."""
    parameters = inspect.signature(create).parameters.values()
    names = [parameter.name for parameter in parameters]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return create  # its **options are checked by the class that receives them

    @wraps(create)
    def create_checked(*args: P.args, **values: P.kwargs) -> R:
        check_keys(create.__qualname__, values, names)
        return create(*args, **values)

    return create_checked


def find_complete_fix(
    subject: T, error: FieldError, check: Callable[[T], object] | None = None
) -> dict[str, object] | None:
    """Return a minimal set of changes that makes ``subject``, whose constructor raised ``error``, valid.

    ``check`` raises ``FieldError`` for a constructed object that is not valid either; one whose fix is text
    (``pip install ...``) needs no further change. Return None if the error's own fix is enough, if it is
    text, or if the search finds nothing.
    """
    first_fix = error.fix_values
    if first_fix is None:
        return None
    # The search constructs the object many times; each failure would start a search of its own.
    with without_fix_search():
        search = _Search(subject, check)
        changes = search.extend({}, first_fix)
        if changes is None:
            return None
        # Drop each change that is not needed: later steps may have made earlier ones redundant.
        for name, value in list(changes.items()):
            # A degree of another layout stays: without it that layout would be valid too, but another one.
            if name == "layout" or ("layout" in first_fix and first_fix.get(name) == value):
                continue
            fewer = {key: other for key, other in changes.items() if key != name}
            if fewer and search.find_error(fewer) is None:
                changes = fewer
    return None if changes == first_fix else changes


def find_changes(error: FieldError) -> dict[str, object]:
    """Return the changes of ``error.fix``; see :attr:`FieldError.changes`."""
    if error.field.endswith(" key"):
        return {}  # the fix is another key, not another value
    # "Recipe.seq_len" names the class before the dot; "Layout tp x pp" has none.
    owner = error.field.removeprefix("Layout ").rpartition(".")[0]
    owner = "Layout" if error.field.startswith("Layout ") else owner
    changes: dict[str, object] = {}
    for name, value in (error.fix_values or {}).items():
        if name == "layout":
            changes["Layout"] = _create_layout(value)
        else:
            field_owner = owner if name in error.field_names else find_owner(name) or owner
            changes[f"{field_owner}.{name}" if field_owner else name] = value
    return changes


def find_owner(name: str) -> str:
    """Return the class, "Recipe" or "Layout", that has the field ``name``; empty if neither has it."""
    from shardscope.core.layout import Layout  # layout.py imports this module.
    from shardscope.core.recipe import Recipe

    if name in _get_init_fields(Recipe):
        return "Recipe"
    is_layout_field = any(name in _get_init_fields(kind) for kind in Layout.__subclasses__())
    return "Layout" if is_layout_field else ""


class _Search(Generic[T]):
    """Depth-first search over sets of changes, each tried once because fixes may form a cycle."""

    def __init__(self, subject: T, check: Callable[[T], object] | None) -> None:
        self._subject = subject
        self._check = check
        self._tried: set[str] = set()

    def extend(self, before: Mapping[str, object], step: Mapping[str, object]) -> dict[str, object] | None:
        """Return ``before`` and ``step`` with all changes that further errors suggest; None if invalid."""
        # A new layout class has other fields: earlier changes of layout fields no longer apply.
        if "layout" in step:
            recipe_fields = _get_init_fields(_get_parts(self._subject)[0])
            before = {name: value for name, value in before.items() if name in recipe_fields}
        changes = {**before, **step}
        # The same changes in another order are the same candidate.
        key = repr(sorted(changes.items(), key=lambda item: item[0]))
        if key in self._tried or len(self._tried) >= MAX_TRIES:
            return None
        self._tried.add(key)
        error = self.find_error(changes)
        if error is None:
            return changes
        for next_step in self._suggest_steps(error):
            complete = self.extend(changes, next_step)
            if complete is not None:
                return complete
        return None

    def find_error(self, changes: Mapping[str, object]) -> FieldError | None:
        """Return the error of the object with ``changes``; None if no further change is needed."""
        try:
            changed = _rebuild(self._subject, changes)
        except FieldError as error:
            return error
        try:
            if self._check is not None:
                self._check(changed)
        except FieldError as error:
            # Without a package that is to be installed, only a plan that trains something else is valid.
            return None if error.fix_values is None else error
        return None

    def _suggest_steps(self, error: FieldError) -> Iterator[dict[str, object]]:
        """Yield the changes to try next: the error's own fix, then the default values of its fields."""
        if error.fix_values is not None:
            yield error.fix_values
        # If the suggested values lead to no valid object, the fields' defaults may.
        defaults = {
            name: field.default
            for part in _get_parts(self._subject)
            for name, field in _get_init_fields(part).items()
        }
        reset = {name: defaults[name] for name in error.field_names if name in defaults}
        if reset:
            yield reset


def _get_parts(subject: DataclassInstance) -> tuple[DataclassInstance, ...]:
    """Return the objects whose fields a fix may change: a plan's recipe and layout, or the object itself."""
    from shardscope.core.plan import Plan  # plan.py imports this module.

    return (subject.recipe, subject.layout) if isinstance(subject, Plan) else (subject,)


def _rebuild(subject: T, changes: Mapping[str, object]) -> T:
    """Return the object with ``changes``. Raises ``ValueError`` if it is invalid."""
    from shardscope.core.plan import Plan  # plan.py imports this module.

    if not isinstance(subject, Plan):
        return replace_fields(subject, changes)
    recipe, layout = subject.recipe, subject.layout
    # Apply the new layout class first, then field changes to the object that has the field.
    rest = dict(changes)
    if "layout" in rest:
        layout = _create_layout(rest.pop("layout"))
    recipe_fields = _get_init_fields(recipe)
    recipe_changes = {name: rest.pop(name) for name in list(rest) if name in recipe_fields}
    parts = {"recipe": replace_fields(recipe, recipe_changes), "layout": replace_fields(layout, rest)}
    return replace_fields(subject, parts)


def _create_layout(constructor: object) -> Layout:
    """Return the layout of a fix: ``{"layout": "fsdp2"}`` means ``Layout.fsdp2()``."""
    from shardscope.core.layout import Layout  # layout.py imports this module.

    layout = getattr(Layout, str(constructor))()
    assert isinstance(layout, Layout), constructor
    return layout


def _get_init_fields(kind: DataclassInstance | type[DataclassInstance]) -> dict[str, Field[object]]:
    return {field.name: field for field in fields(kind) if field.init}
