"""Folders of this user, whose home folder a container or a service may lack."""

from __future__ import annotations

import os
from pathlib import Path


def expand_home(path: str | os.PathLike[str]) -> Path:
    """Return ``path`` with the home folder instead of ``~``; unchanged if that user has none.

    ``Path.expanduser`` raises ``RuntimeError`` then, where the caller's error names the path that is missing.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def lacks_home(path: Path) -> bool:
    """Return whether :func:`expand_home` left a ``~`` in ``path``, because that user has no home folder."""
    return path.parts[:1] != () and path.parts[0].startswith("~")


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
