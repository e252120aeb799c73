"""Transfer of the task from the kernel to the ranks with cloudpickle; pickling errors raise at launch."""

from __future__ import annotations

import copy
import io
import linecache
import os
import pickle
import types
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.records.folder import NodeFolder, RunFolder
from shardscope.runs.launch.unpicklable import find_unpicklable, get_qualified_name
from shardscope.training.tasks.text_task import TextTask

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.runs.launch.context import Context

MAX_SOURCE_CHARACTERS = 2**20
"""Maximum source text sent to the ranks: notebook cells are far shorter, but generated code may not be."""


def pack(task: object, plan: Plan) -> bytes:
    """Return ``(task, plan)`` and the source of notebook cells as bytes.

    Raises ``ValueError`` naming the object that cannot be pickled.
    """
    try:
        return _pickle((task, plan, collect_cell_sources()))
    except Exception as error:
        culprit = find_unpicklable(task) or f"{describe_task(task)} itself"
        raise ValueError(
            f"The task {describe_task(task)} cannot be sent to the ranks: {culprit} cannot be pickled "
            f"({type(error).__name__}: {str(error)[:200]}). Nearest fix: create it inside the function."
        ) from error


def _pickle(value: object) -> bytes:
    """Return the cloudpickle of ``value``, with the file names that code was compiled from.

    cloudpickle 3.1.3 writes "<dynamic-code>" for each (``_code_reduce``), and a traceback from a rank would
    name neither the cell of a function nor its lines.
    """
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: object) -> object:
            if type(obj) is not types.CodeType:
                return super().reducer_override(obj)
            # cloudpickle's own reduction, wrapped in a function that restores the file name.
            make, arguments = self.dispatch_table[types.CodeType](obj)
            return _make_code, (make, arguments, obj.co_filename)

    buffer = io.BytesIO()
    Pickler(buffer, cloudpickle.DEFAULT_PROTOCOL).dump(value)
    return buffer.getvalue()


def _make_code(
    make: Callable[[*tuple[object, ...]], types.CodeType], arguments: tuple[object, ...], file_name: str
) -> types.CodeType:
    return make(*arguments).replace(co_filename=file_name)


def unpack(payload: bytes) -> tuple[Callable[[Context], object], Plan]:
    """Return ``(task, plan)``, and register the source of notebook cells for this process's tracebacks."""
    task, plan, sources = pickle.loads(payload)
    for name, lines in sources.items():
        # An entry without a modification time is never checked against a file (linecache.checkcache).
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    return task, plan


def resume_from(task: Callable[[Context], object], checkpoint: Path | None) -> Callable[[Context], object]:
    """Return the task of a later attempt: a built-in one resumes from ``checkpoint``, if there is one."""
    if checkpoint is None or not isinstance(task, TextTask):
        return task
    resumed = copy.copy(task)
    # Not dataclasses.replace: it would check and look up the user's paths again.
    object.__setattr__(resumed, "resume", checkpoint)
    return resumed


def collect_cell_sources() -> dict[str, list[str]]:
    """Return the source lines of code that was not compiled from a file, by the name it was compiled under.

    IPython registers each cell with linecache under a name that is not a file. A pickled function keeps that
    name, so without the source a rank's traceback would show line numbers and no lines. If there is too much
    source, the newest is kept.
    """
    # The newest entries are last in the cache: they are the cells that the user is working on.
    sources: dict[str, list[str]] = {}
    left = MAX_SOURCE_CHARACTERS
    for name, entry in reversed(list(linecache.cache.items())):
        if len(entry) != 4 or entry[1] is not None or Path(name).exists():
            continue  # Lazy entries (modules) and entries with a modification time have a file.
        size, lines = sum(map(len, entry[2])), list(entry[2])
        if size > left:
            break
        left -= size
        sources[name] = lines
    return sources


def write_task(folder: RunFolder, payload: bytes) -> None:
    """Write the task to a file that only this user can read. Raises ``OSError``."""
    descriptor = os.open(folder.task, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(payload)


def take_task(folder: RunFolder) -> bytes:
    """Read the task and unlink it. Raises ``PermissionError`` if another user owns it or its folder.

    Nodes and attempts share the file; the supervisor unlinks it when the run has ended.
    """
    # lstat: a symbolic link that another user planted counts as that user's.
    for path in (folder.path, folder.task):
        owner = Path(path).lstat().st_uid
        if owner != os.getuid():
            raise PermissionError(
                f"{path} belongs to user {owner}, and a pickled task runs code: not opened."
            )
    payload = folder.task.read_bytes()
    if not isinstance(folder, NodeFolder) and folder.fixed_attempt is None:
        folder.task.unlink()
    return payload


def describe_task(task: object) -> str:
    """Return the task's name for records and errors: never its values, which may hold a token."""
    return get_qualified_name(task)
