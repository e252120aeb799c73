"""Folders of this user, whose home folder a container or a service may lack."""

from __future__ import annotations

import os
from pathlib import Path

from shardscope.core.errors import Fix, refuse


def expand_home(path: str | os.PathLike[str]) -> Path:
    """Return ``path`` with the home folder instead of ``~``; unchanged if that user has none.

    ``Path.expanduser`` raises ``RuntimeError`` then, where the caller's error names the path that is missing.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def list_entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return what is in ``folder``, to suggest one of its names; nothing if it cannot be listed."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def check_home(field: str, path: str | os.PathLike[str], fix: Fix) -> Path:
    """Return :func:`expand_home` of ``path``. Raises ``ValueError`` if that user has no home folder."""
    expanded = expand_home(path)
    if expanded.parts and expanded.parts[0].startswith("~"):
        refuse(field, os.fspath(path), "a path; that user has no home folder", fix)
    return expanded


def find_cache_folder() -> Path:
    """Return ``shardscope`` in the user's cache folder (``XDG_CACHE_HOME``). Raises ``FileNotFoundError``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else find_home_folder("XDG_CACHE_HOME") / ".cache") / "shardscope"


def find_home_folder(variable: str) -> Path:
    """Return the user's home folder.

    Raises ``FileNotFoundError`` with the environment variable that replaces it if this user has none: a
    process without ``HOME`` whose user is in no list of users.
    """
    try:
        return Path.home()
    except RuntimeError:
        message = f"This user has no home folder. Nearest fix: set HOME, or {variable} to a folder."
        raise FileNotFoundError(message) from None
