"""Temporary folder that all ranks write together and that is renamed when it is complete."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from shardscope.machine.os_errors import find_disk_fix, is_disk_error
from shardscope.records.folder import RunFolder
from shardscope.training.checkpoints.folders import OWN_FOLDER

_FAILED_WRITES = ("inline_container.cc", "iostream error")
"""Parts of torch's errors of a write of ``torch.save`` that failed, which do not say why."""


class OtherRankError(RuntimeError):
    """Consequence of another rank's error, which is the reason of the failure (runs/explain/failure.py)."""


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
    replace_on_all_nodes(temporary, path, raise_on_all_ranks)


def create_temporary(path: Path) -> Path:
    """Create the temporary folder for ``path``. Return it, on all ranks."""
    temporary = _name_temporary(path)
    with raising_on_all_ranks():
        if writes_folder():
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
    return temporary


def _name_temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


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
    raise_on_all_ranks(error)


def raise_on_all_ranks(
    error: BaseException | None, group: dist.ProcessGroup | None = None, folder: Path | None = None
) -> None:
    """Raise the ``OSError`` that any rank of ``group`` has, else this rank's own ``error``. Collective.

    ``folder`` is that of :func:`as_os_error`.
    """
    own = None if error is None else as_os_error(error, folder)
    record = None
    if own is not None:
        # Where each node has a disk of its own, the name of the one that has no space.
        where = f" on {platform.node()}" if os.environ.get(OWN_FOLDER) == "1" else ""
        own = OSError(own.errno, f"{own.strerror or own}{where}", own.filename)
        own.__cause__ = error
        record = (own.errno, own.strerror, own.filename)
    records: list[tuple[int | None, str, str | None] | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(records, record, group=group)
    # A rank may only know of another one's write that it failed.
    known = sorted(filter(None, records), key=lambda each: each[0] == errno.EIO)
    if own is not None and own.errno == known[0][0]:
        raise own
    if known:
        raise OSError(*known[0]) from error
    if error is not None:
        raise error


def raise_if_a_rank_failed(error: BaseException | None, path: Path, group: dist.ProcessGroup) -> None:
    """Raise this rank's ``error``, or ``OtherRankError`` if another rank of ``group`` has one. Collective.

    For the threads that write ``path``: :func:`raise_on_all_ranks` then tells all ranks the same.
    """
    failed = torch.tensor(int(error is not None))
    dist.all_reduce(failed, group=group)
    if error is not None:
        raise error
    if int(failed):
        raise OtherRankError(f"other ranks could not write their part of {path}")


@contextmanager
def failing_alone(folder: Path) -> Iterator[None]:
    """Raise an error of the disk of ``folder`` as ``RuntimeError``, which ends the run.

    For a framework's own save: this rank has the error alone, and the others wait in the next collective.
    """
    try:
        yield
    except Exception as raised:
        error = as_os_error(raised, folder)
        if error is None or not is_disk_error(error):
            raise
        why = f"a part of the checkpoint could not be written: {error.strerror}"
        raise RuntimeError(f"{why}. Nearest fix: {find_disk_fix(error)}") from raised


def as_os_error(error: BaseException, folder: Path | None = None) -> OSError | None:
    """Return ``error`` as an ``OSError``; None if it is another one.

    torch's checkpoints wrap the errors of all ranks. Libraries in Rust, such as safetensors and tokenizers,
    and megatron-core's writers only name the number in their text. Where torch says no more than that a write
    failed, the disk of ``folder`` tells whether it is full.
    """
    if isinstance(error, OSError):
        return error
    if isinstance(error, CheckpointException):
        causes = (as_os_error(cause, folder) for cause, _ in error.failures.values())
        return next(filter(None, causes), None)
    if any(part in str(error) for part in _FAILED_WRITES):
        is_full = folder is not None and RunFolder(folder).is_on_full_disk
        converted = OSError(*_describe(errno.ENOSPC if is_full else errno.EIO))
        converted.__cause__ = error
        return converted
    number = re.search(r"(?:\(os error |^Worker failure: \[Errno )(\d+)", str(error))
    if number is None:
        return None
    converted = OSError(*_describe(int(number[1])))
    converted.__cause__ = error
    return converted


def _describe(number: int) -> tuple[int, str]:
    return number, os.strerror(number)


def delete_temporary(path: Path) -> None:
    """Delete the temporary folder for ``path``, which no rank writes any more."""
    if writes_folder():
        shutil.rmtree(_name_temporary(path), ignore_errors=True)


def writes_folder() -> bool:
    """Return whether this rank creates and renames folders: rank 0.

    Where nodes share no folder it is the first rank of each node, which then has the files of its own ranks.
    """
    return dist.get_rank() == 0 or (os.environ.get(OWN_FOLDER) == "1" and os.environ.get("LOCAL_RANK") == "0")


def replace_on_all_nodes(
    temporary: Path, path: Path, raise_together: Callable[[OSError | None], None]
) -> None:
    """Rename ``temporary`` to ``path``, where nodes share no folder on all of them or on none. Collective.

    ``raise_together`` gets this rank's error, and raises on all ranks if one has any.
    """
    error: OSError | None = None
    is_writer = writes_folder()
    try:
        if is_writer:
            _move_into_place(temporary, path)
    except OSError as raised:
        error = raised
    try:
        raise_together(error)
    # Not the error of a collective whose other ranks are lost: the folder is complete then.
    except (OSError, OtherRankError):
        if is_writer and error is None:
            with contextlib.suppress(OSError):
                path.rename(temporary)
                _restore_old(path)
        raise
    finally:
        # Also if other ranks are lost: a run ends then, and nothing else would delete the older one.
        with contextlib.suppress(OSError):
            if is_writer and path.exists():
                shutil.rmtree(_name_old(path), ignore_errors=True)


def _move_into_place(temporary: Path, path: Path) -> None:
    """Rename ``temporary`` to ``path``; an existing folder, which rename(2) would not replace, is moved."""
    shutil.rmtree(_name_old(path), ignore_errors=True)
    if path.exists():
        path.rename(_name_old(path))
    try:
        temporary.rename(path)
    except OSError:
        _restore_old(path)
        raise


def _restore_old(path: Path) -> None:
    if _name_old(path).exists():  # The next call would delete it.
        _name_old(path).rename(path)


def _name_old(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def check_own(path: Path) -> None:
    """Raise ``PermissionError`` unless this user owns ``path`` and all files in it, as some are pickles."""
    for entry in (path, *path.rglob("*")):
        if entry.stat().st_uid != os.getuid():
            raise PermissionError(f"{entry} belongs to another user; it may be a pickle, so it is not opened")
