"""The task crosses from the kernel to the ranks once, by cloudpickle; what cannot is named before."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

from shardscope.runs.folder import RunFolder


def pack(task: Any, plan: Any) -> bytes:
    """``(task, plan)`` as bytes. Raises ``ValueError`` naming the object that cannot be pickled."""
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps((task, plan)))
    except Exception as error:
        culprit = _culprit(task) or f"{describe(task)} itself"
        raise ValueError(
            f"The task {describe(task)} cannot be sent to the ranks: {culprit} cannot be pickled "
            f"({type(error).__name__}: {str(error)[:200]}). Nearest fix: create it inside the function."
        ) from error


def write_task(folder: RunFolder, payload: bytes) -> None:
    """Write the task so that nobody but this user reads it. Raises ``OSError``."""
    descriptor = os.open(folder.task, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(payload)


def take_task(folder: RunFolder) -> bytes:
    """Read the task and unlink it. Raises ``PermissionError`` if somebody else owns it or its folder."""
    for path in (folder.path, folder.task):
        owner = Path(path).lstat().st_uid
        if owner != os.getuid():
            raise PermissionError(
                f"{path} belongs to user {owner}, and a pickled task runs code: not opened."
            )
    payload = folder.task.read_bytes()
    folder.task.unlink()
    return payload


def describe(task: Any) -> str:
    """The task's name for records and refusals: never its values, which may hold a token."""
    named = task if hasattr(task, "__qualname__") else type(task)
    return f"{getattr(named, '__module__', '?')}.{named.__qualname__}"


def _culprit(task: Any, depth: int = 3) -> str | None:
    """Where the first thing that cannot be pickled hangs, in words."""
    for where, value in _parts(task):
        if _pickles(value):
            continue
        inner = _culprit(value, depth - 1) if depth else None
        return inner or f"{where}, a {type(value).__module__}.{type(value).__qualname__},"
    return None


def _parts(value: Any) -> list[tuple[str, Any]]:
    owner = getattr(value, "__qualname__", type(value).__qualname__)
    if inspect.ismethod(value):
        return _parts(value.__func__) + _parts(value.__self__)
    if inspect.isfunction(value):
        used = inspect.getclosurevars(value)
        defaults = {f"default {i}": item for i, item in enumerate(value.__defaults__ or ())}
        defaults.update(value.__kwdefaults__ or {})
        by_kind = {"its global": used.globals, "its outer variable": used.nonlocals, "its default": defaults}
        return [
            (f"{kind} {name!r} (used by {owner})", item)
            for kind, found in by_kind.items()
            for name, item in found.items()
            if item is not value
        ]
    if isinstance(value, dict):
        return [(f"the item {key!r} of a dict", item) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [(f"item {i} of a {type(value).__name__}", item) for i, item in enumerate(value)]
    attributes = dict(getattr(value, "__dict__", {})) if not inspect.isclass(value) else {}
    return [(f"the attribute {name!r} of {owner}", item) for name, item in attributes.items()]


def _pickles(value: Any) -> bool:
    import cloudpickle

    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True
