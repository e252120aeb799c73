"""The task crosses from the kernel to the ranks once, by cloudpickle; what cannot is named before."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from shardscope.runs.folder import RunFolder
from shardscope.runs.unpicklable import name_of, where


def pack(task: Any, plan: Any) -> bytes:
    """``(task, plan)`` as bytes. Raises ``ValueError`` naming the object that cannot be pickled."""
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps((task, plan)))
    except Exception as error:
        culprit = where(task) or f"{describe(task)} itself"
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
    return name_of(task)
