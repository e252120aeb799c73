"""Temporary folder that all ranks write together and that is renamed when it is complete."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from shardscope.training.checkpoints.folders import OWN_FOLDER


@contextmanager
def replace_when_complete(path: Path) -> Iterator[Path]:
    """Yield an empty folder on all ranks, which is renamed to ``path`` when every rank has left the block.

    An older folder at ``path`` is replaced: readers see the old one or the complete new one. A run that dies
    in between leaves ``.<name>.partial``, which the next writer of ``path`` deletes.
    """
    temporary = create_temporary(path)
    yield temporary
    # Rank 0 must not rename a folder into which another rank still writes.
    dist.barrier()
    # No rank returns before the rename: one that fails next would end the run, and rank 0 with it.
    with raising_on_all_ranks():
        if writes_folder():
            replace_folder(temporary, path)


def create_temporary(path: Path) -> Path:
    """Create the temporary folder for ``path``. Return it, on all ranks."""
    temporary = path.with_name(f".{path.name}.partial")
    with raising_on_all_ranks():
        if writes_folder():
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
    return temporary


@contextmanager
def raising_on_all_ranks() -> Iterator[None]:
    """Raise the ``OSError`` of one rank's block on all of them, which leave the block together.

    The others would wait for it in their next collective. Errors of libraries in Rust become an ``OSError``.
    """
    error: OSError | None = None
    try:
        yield
    except Exception as raised:
        error = as_os_error(raised)
        if error is None:
            raise
    own = None if error is None else (error.errno, error.strerror or str(error), error.filename)
    errors: list[tuple[int, str, str | None] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, own)
    if error is not None:
        raise error
    if other := next(filter(None, errors), None):
        raise OSError(*other)


def as_os_error(error: Exception) -> OSError | None:
    """Return ``error`` as an ``OSError``; None if it is another one.

    Libraries in Rust, such as safetensors and tokenizers, only name the number in their text.
    """
    if isinstance(error, OSError):
        return error
    number = re.search(r"\(os error (\d+)\)", str(error))
    if number is None:
        return None
    converted = OSError(int(number[1]), os.strerror(int(number[1])))
    converted.__cause__ = error
    return converted


def writes_folder() -> bool:
    """Return whether this rank creates and renames folders: rank 0.

    Where nodes share no folder it is the first rank of each node, which then has the files of its own ranks.
    """
    return dist.get_rank() == 0 or (os.environ.get(OWN_FOLDER) == "1" and os.environ.get("LOCAL_RANK") == "0")


def replace_folder(temporary: Path, path: Path) -> None:
    """Rename ``temporary`` to ``path``; an existing folder, which rename(2) would not replace, is moved."""
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    temporary.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def check_own(path: Path) -> None:
    """Raise ``PermissionError`` unless this user owns ``path`` and all files in it, as some are pickles."""
    for entry in (path, *path.rglob("*")):
        if entry.stat().st_uid != os.getuid():
            raise PermissionError(f"{entry} belongs to another user; it may be a pickle, so it is not opened")
