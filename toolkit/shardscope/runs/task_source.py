"""Check that an object is a task, and read the source text of the user's own function or script."""

from __future__ import annotations

import ast
import functools
import inspect

from shardscope.core.errors import refuse
from shardscope.runs.checks.script import Script
from shardscope.training.tasks.lazy_functions import refuse_lazy_function


def check_task(field: str, task: object) -> None:
    """Raise ``ValueError`` that names ``field`` unless ``task`` can be called as one."""
    allowed = "a callable f(ctx), such as your own function or ss.Pretrain(...)"
    if inspect.isclass(task):  # Calling a class would only construct a task on every rank, not run it.
        refuse(field, task, allowed, f"{task.__name__}(...)")
    if not callable(task):
        refuse(field, task, allowed, "def task(ctx): ...")
    refuse_lazy_function(field, task)


def read_source(task: object) -> str | None:
    """Return the source text of the user's function or script; None for other tasks and unknown sources."""
    if callable(read := getattr(task, "source_text", None)):
        text: str | None = read()
        return text
    # inspect.getsource raises TypeError for a partial object.
    while isinstance(task, functools.partial):
        task = task.func
    if not inspect.isfunction(task) and not inspect.ismethod(task):
        return None
    # OSError: a function that was compiled from text, or whose file is gone.
    try:
        return inspect.getsource(task)
    except (OSError, TypeError):
        return None


def uses_engine(task: object) -> bool:
    """Return whether the user's function reads the attribute ``engine`` of a parameter (``ctx.engine``)."""
    source = read_source(task)
    if source is None or "engine" not in source:
        return False
    nodes = Script(source=source).nodes
    parameters = {node.arg for node in nodes if isinstance(node, ast.arg)} - {"self"}
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == "engine"
        and isinstance(node.value, ast.Name)
        and node.value.id in parameters
        for node in nodes
    )
