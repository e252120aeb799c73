"""Lazy functions (``async def`` functions and generators), whose call only creates an object.

As a task, one would return immediately on every rank, and a run without any step would count as finished.
"""

from __future__ import annotations

import functools
import inspect

from shardscope.core.errors import refuse


def refuse_lazy_function(field: str, function: object) -> None:
    """Raise ``ValueError`` naming ``function`` and the fix if calling it would not run its body.

    ``functools.partial`` and bound methods are unwrapped; for other objects ``__call__`` is checked.
    """
    called = _unwrap_callable(function)
    name = str(getattr(called, "__qualname__", type(function).__qualname__)).rpartition("<locals>.")[2]
    if inspect.iscoroutinefunction(called):
        kind, fix = f"async def {name}", f"a def that calls asyncio.run({name}(...))"
    elif inspect.isasyncgenfunction(called):
        kind, fix = f"async def {name}, a generator", f"a def that runs `async for _ in {name}(...): pass`"
    elif inspect.isgeneratorfunction(called):
        kind, fix = f"the generator {name}", f"a def that runs `for _ in {name}(...): pass`"
    else:
        return
    refuse(field, kind, "a function whose call runs its body; this call would make an object and return", fix)


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
        result.close()  # Otherwise Python warns later that it was never awaited.
    name = result.__qualname__.rpartition("<locals>.")[2]
    raise TypeError(
        f"the task returned the {kind} {name}, which never ran. Nearest fix: {fix.format(name=name)}."
    )


def _unwrap_callable(function: object) -> object:
    """Return the function whose body a call of ``function`` would run."""
    # A partial may wrap an object with __call__, and that again a partial.
    while not (inspect.isroutine(function) or inspect.isclass(function)):
        if isinstance(function, functools.partial):
            function = function.func
        else:
            call = inspect.getattr_static(type(function), "__call__", None)
            function = getattr(call, "__func__", call)  # Unwrap a staticmethod.
            if function is None:
                break
    return function
