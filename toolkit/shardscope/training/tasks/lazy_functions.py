"""Functions whose call runs nothing: ``async def`` functions and generators, which only make an object.

As a task, one would return at once on every rank, and a run that did no step would be called finished.
"""

from __future__ import annotations

import functools
import inspect

from shardscope.core.errors import refuse


def refuse_lazy_function(field: str, function: object) -> None:
    """Raise ``ValueError`` naming ``function`` and the fix if calling it would run none of its body.

    Looks through ``functools.partial`` and bound methods, and at ``__call__`` of other callable objects.
    """
    called = _called(function)
    name = str(getattr(called, "__qualname__", type(function).__qualname__)).rpartition("<locals>.")[2]
    if inspect.iscoroutinefunction(called):
        what, fix = f"async def {name}", f"a def that calls asyncio.run({name}(...))"
    elif inspect.isasyncgenfunction(called):
        what, fix = f"async def {name}, a generator", f"a def that runs `async for _ in {name}(...): pass`"
    elif inspect.isgeneratorfunction(called):
        what, fix = f"the generator {name}", f"a def that runs `for _ in {name}(...): pass`"
    else:
        return
    refuse(field, what, "a function whose call runs its body; this call would make an object and return", fix)


def check_was_run(result: object) -> None:
    """Raise ``TypeError`` if a task's ``result`` shows that its body never ran.

    Catches what :func:`refuse_lazy_function` cannot see before the call: a lambda or a decorator around one.
    """
    if inspect.iscoroutine(result):
        kind, fix = "coroutine", "call asyncio.run({name}(...))"
    elif inspect.isasyncgen(result):
        kind, fix = "asynchronous generator", "run `async for _ in {name}(...): pass`"
    elif inspect.isgenerator(result):
        kind, fix = "generator", "run `for _ in {name}(...): pass`"
    else:
        return
    if not inspect.isasyncgen(result):
        result.close()  # Else Python warns later that it was never awaited.
    name = result.__qualname__.rpartition("<locals>.")[2]
    raise TypeError(
        f"the task returned the {kind} {name}, which never ran. Nearest fix: {fix.format(name=name)}."
    )


def _called(function: object) -> object:
    """The function whose body a call of ``function`` would enter."""
    while not (inspect.isroutine(function) or inspect.isclass(function)):
        if isinstance(function, functools.partial):
            function = function.func
        else:
            call = inspect.getattr_static(type(function), "__call__", None)
            function = getattr(call, "__func__", call)  # A staticmethod has its function there.
            if function is None:
                break
    return function
