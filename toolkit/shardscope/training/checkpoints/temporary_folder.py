"""A folder that all ranks write together, under another name until it is whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """An empty folder beside ``path``, on all ranks; it becomes ``path`` when every rank left the block.

    An older folder there is replaced. Whoever looks at ``path`` sees the old one or the whole new one; a run
    that dies in between leaves ``.<name>.partial``, which the next writer of ``path`` removes.
    """
    aside = begin_aside(path)
    yield aside
    # Rank 0 must not rename a folder that another still writes into.
    dist.barrier()
    if dist.get_rank() == 0:
        replace(aside, path)
    # Nobody returns before the name exists, so a rank that fails next cannot tear down an unfinished rename.
    dist.barrier()


def begin_aside(path: Path) -> Path:
    """The empty folder in which ``path`` is written until it is whole, on all ranks."""
    aside = path.with_name(f".{path.name}.partial")
    if dist.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
    dist.barrier()
    return aside


def replace(aside: Path, path: Path) -> None:
    """Put ``aside`` where ``path`` is; a folder cannot be renamed onto a full one, so that one goes first."""
    old = path.with_name(f".{path.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    aside.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def check_own(path: Path) -> None:
    """Raise ``PermissionError`` unless ``path`` and all in it are this user's: what pickles is not opened."""
    for part in (path, *path.rglob("*")):
        if part.stat().st_uid != os.getuid():
            raise PermissionError(f"{part} is another user's; the format pickles, so it is not opened")
