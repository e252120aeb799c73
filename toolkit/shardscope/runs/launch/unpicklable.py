"""Search for the variable or attribute of a task that cannot be pickled, for the error message."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Iterator

from shardscope.core.errors import add_article


def get_qualified_name(value: object) -> str:
    """Return ``module.qualname`` of a function or class, or of the class of anything else."""
    target = value if hasattr(value, "__qualname__") else type(value)
    return f"{getattr(target, '__module__', '?')}.{getattr(target, '__qualname__', '?')}"


def find_unpicklable(task: object) -> str | None:
    """Describe the first unpicklable part of ``task`` and its type, one level deep; None if none is found."""
    try:
        parts = list(_find_pickled_values(task))
    except ValueError:  # inspect.getclosurevars raises it for an outer variable without a value yet.
        return None
    for position, value in parts:
        if not _can_be_pickled(value):
            return f"{position}, {add_article(get_qualified_name(type(value)).removeprefix('builtins.'))},"
    return None


def _find_pickled_values(task: object) -> Iterator[tuple[str, object]]:
    """Yield (description of the position, value) for each value that is pickled with ``task``."""
    name = get_qualified_name(task).rpartition(".")[2]
    if isinstance(task, functools.partial):
        function = get_qualified_name(task.func).rpartition(".")[2]
        for argument, value in itertools.chain(enumerate(task.args), task.keywords.items()):
            yield f"the argument {argument!r} of the partial of {function}", value
        yield from _find_pickled_values(task.func)
    elif inspect.ismethod(task):  # A bound method is pickled as its object and its name.
        yield from _find_pickled_values(task.__self__)
    elif inspect.isfunction(task):
        used = inspect.getclosurevars(task)
        for variable, value in used.nonlocals.items():
            yield f"the outer variable {variable!r} of {name}", value
        # Only functions of a notebook are pickled with their globals; those of a module by name.
        for variable, value in used.globals.items():
            yield f"the global {variable!r} that {name} uses", value
        for argument, parameter in inspect.signature(task).parameters.items():
            if parameter.default is not inspect.Parameter.empty:
                yield f"the default of {argument!r} of {name}", parameter.default
    else:
        for attribute, value in getattr(task, "__dict__", {}).items():
            yield f"{name}.{attribute}", value


def _can_be_pickled(value: object) -> bool:
    import cloudpickle

    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True
