"""The files of stored measurements: one for each machine and GPU type, in the user's data folder.

The folder is ``$SHARDSCOPE_DATA_HOME``, or else ``shardscope`` in the user's data folder by the XDG Base
Directory Specification 0.8 (``$XDG_DATA_HOME``, ``~/.local/share``). ``store.py`` reads and writes the files.
"""

from __future__ import annotations

import os
import re
from functools import lru_cache
from pathlib import Path

from shardscope.core.errors import Value, refuse
from shardscope.machine.user_folders import expand_home, find_home_folder

FOLDER_VARIABLE = "SHARDSCOPE_DATA_HOME"


class NotStoredError(OSError):
    """Failure to write a calibration or a measured step; the message names the folder and a fix."""


def find_data_folder(folder: str | os.PathLike[str] | None = None) -> Path:
    """Return ``folder``, or the user's default data folder.

    Raises ``ValueError`` for an invalid path, and :class:`NotStoredError` for a user without a home folder.
    """
    if folder is not None:
        text = os.fspath(folder) if isinstance(folder, str | os.PathLike) else None
        if not isinstance(text, str) or not text or "\0" in text:
            refuse("calibrate.folder", folder, "a folder's path, or None", Value(None))
        return expand_home(text).absolute()
    if named := os.environ.get(FOLDER_VARIABLE):
        return expand_home(named).absolute()
    base = os.environ.get("XDG_DATA_HOME", "")
    # The specification: a relative path is invalid, and ignored.
    if Path(base).is_absolute():
        return Path(base) / "shardscope"
    try:
        return find_home_folder(FOLDER_VARIABLE) / ".local" / "share" / "shardscope"
    except FileNotFoundError as error:
        raise NotStoredError(str(error)) from None


def build_record_path(gpu: str, folder: Path, machine: str | None = None) -> Path:
    """Return the file of ``machine`` (this one by default) and ``gpu``."""
    return folder / "calibration" / build_file_name(machine or get_machine_name(), gpu)


@lru_cache(maxsize=1)
def get_machine_name() -> str:
    """Return this host's name as used in files and reports."""
    import socket  # not needed by predictions without a stored calibration

    return make_name_safe(socket.gethostname()) or "unnamed"


@lru_cache(maxsize=64)
def build_file_name(machine: str, gpu: str) -> str:
    return f"{make_name_safe(machine)}--{make_name_safe(gpu)}.json"


def read_stamp(path: str) -> tuple[int, int, int] | None:
    """Return modification time, size and inode of a file or folder, to detect changes."""
    try:
        status = os.stat(path)  # noqa: PTH116 - creating a Path takes longer than the call
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def make_name_safe(name: str) -> str:
    """Return ``name`` with only characters that are safe in a file name."""
    # A file name of two such names stays below the usual limit of 255 bytes.
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:100]
