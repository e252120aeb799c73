"""Checks of run folders from untrusted sources: file types, known statuses, value types."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from itertools import islice
from typing import NamedTuple

from shardscope.core.errors import check_integer, check_number
from shardscope.machine.os_errors import describe_shortage
from shardscope.records.folder import (
    ATTEMPTS,
    ENGINE_REPORTS,
    NODES,
    RECORDINGS,
    STATUSES,
    NodeFolder,
    RunFolder,
)
from shardscope.records.json_files import load_json, read_json
from shardscope.records.json_values import is_int, is_number, parse_object
from shardscope.records.regular_files import check_regular

MAX_WORLD_SIZE = 16_384
"""Largest valid world size; a run.json with more ranks is damaged."""
MAX_DESCRIPTION_BYTES = 2**20
MAX_ENTRIES = 4 * MAX_WORLD_SIZE
"""Most entries checked in each subfolder of a run folder."""
FILES = frozenset({
    *("run.json", "status.jsonl", "control.jsonl", "supervisor.json", "supervisor.log", "task.pkl"),
    *("exits.jsonl", "cards.jsonl", "samples.jsonl", "note.json", "metrics.csv", "summary.json", "job.json"),
    *("job_end.json", "puller.json", "received.json", "puller.log"),
})  # fmt: skip
FOLDERS = frozenset({
    *("events", "logs", "errors", "ranks", "traces", ENGINE_REPORTS, "stacks", "memory_snapshots", "ray"),
})  # fmt: skip
"""Subfolders that contain regular files only."""


def open_part(path: str, node: int | None, attempt: int | None = None) -> RunFolder:
    """Return the folder of the run in ``path``, or of one of its nodes. Raises ``ValueError`` if damaged."""
    if node is None:
        return RunFolder(path, attempt)
    num_nodes = (read_json(RunFolder(path).run_json) or {}).get("num_nodes")
    checked = check_integer("run.json num_nodes", num_nodes, low=1, high=MAX_WORLD_SIZE)
    return NodeFolder(path, node, checked, attempt)


def check_file_kinds(folder: RunFolder, *, inside: bool = False) -> None:
    """Check that all known files are regular files and all known subfolders are folders, not links.

    ``inside=True`` also checks the files in these folders, which takes about ten times as long. Raises
    ``ValueError`` with the file's path, and ``OSError`` if ``folder`` cannot be listed.
    """
    # scandir gives the type of most entries without another system call, which matters for thousands of runs.
    with os.scandir(folder.path) as entries:
        for entry in entries:
            if entry.name in FILES and not entry.is_file(follow_symlinks=False):
                check_regular(folder.path / entry.name)
            elif entry.name in FOLDERS:
                _check_folder(entry)
                if inside:
                    _check_inside(entry.path)
            elif entry.name == RECORDINGS:
                _check_folders(entry, inside=inside)
            elif entry.name == NODES:
                _check_folder(entry)
                if inside:
                    _check_nodes(entry.path)
            elif entry.name == ATTEMPTS:
                _check_folder(entry)
                if inside:
                    _check_attempts(entry.path)


def _check_folder(entry: os.DirEntry[str]) -> None:
    if not entry.is_dir(follow_symlinks=False):
        raise ValueError(f"{entry.path} is damaged: it is a file or a link; allowed: a folder.")


def _check_folders(entry: os.DirEntry[str], *, inside: bool) -> None:
    """Check a subfolder that has a folder of regular files for each recording."""
    _check_folder(entry)
    if inside:
        with os.scandir(entry.path) as folders:
            for folder in islice(folders, MAX_ENTRIES):
                _check_folder(folder)
                _check_inside(folder.path)


def _check_nodes(path: str) -> None:
    """Check the folders of nodes: regular files, and folders of regular files."""
    with os.scandir(path) as nodes:
        for node in islice(nodes, MAX_ENTRIES):
            _check_folder(node)
            with os.scandir(node.path) as entries:
                for entry in islice(entries, MAX_ENTRIES):
                    if entry.is_dir(follow_symlinks=False):
                        # Temporary files are deleted, never read.
                        if entry.name != "tmp":
                            _check_inside(entry.path)
                    elif not entry.is_file(follow_symlinks=False):
                        check_regular(RunFolder(entry.path).path)


def _check_attempts(path: str) -> None:
    """Check the folders of attempts: regular files, folders of regular files, and nodes."""
    with os.scandir(path) as attempts:
        for attempt in islice(attempts, MAX_ENTRIES):
            _check_folder(attempt)
            with os.scandir(attempt.path) as entries:
                for entry in islice(entries, MAX_ENTRIES):
                    if entry.name == NODES:
                        _check_folder(entry)
                        _check_nodes(entry.path)
                    elif entry.is_dir(follow_symlinks=False):
                        _check_inside(entry.path)
                    elif not entry.is_file(follow_symlinks=False):
                        check_regular(RunFolder(entry.path).path)


def _check_inside(path: str) -> None:
    with os.scandir(path) as entries:
        for entry in islice(entries, MAX_ENTRIES):
            # Hidden folders are other programs' (.ipynb_checkpoints) and the columns of opened traces, which
            # their own reader checks (trace/loading/cache.py). Nothing opens one as a file of the run.
            if entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
                continue
            if not entry.is_file(follow_symlinks=False):
                check_regular(RunFolder(path).path / entry.name)


class Description(NamedTuple):
    """Content of run.json."""

    data: bytes
    """The file's bytes."""
    world_size: int
    created: float
    """Seconds since the epoch at which the run was launched."""


def read_description(folder: RunFolder) -> Description:
    """Read and check ``run.json``. Raises ``ValueError`` if it is damaged."""
    try:
        data = load_json(folder.run_json, MAX_DESCRIPTION_BYTES)
        record = parse_object(data)
        world_size = check_integer("world_size", record.get("world_size"), low=1, high=MAX_WORLD_SIZE)
        created = check_number("created", record.get("created", 0), low=0, high=1e12)
        _check_types(record, _DESCRIPTION)
        return Description(data, world_size, created)
    except (OSError, ValueError, RecursionError) as error:
        # Too many open files, say, is a problem of this process and no damage of the folder.
        if isinstance(error, OSError) and describe_shortage(error):
            raise
        raise _create_error(folder, "run.json", error) from error


def check_transition(folder: RunFolder, record: Mapping[str, object]) -> None:
    """Check one line of status.jsonl. Raises ``ValueError`` for an unknown status or a wrong type."""
    try:
        status = record["status"]
        if not isinstance(status, str) or status not in STATUSES:
            raise ValueError(f"its status is {_format_value(status)}; allowed: {', '.join(sorted(STATUSES))}")
        _check_types(record, _TRANSITION)
    except ValueError as error:
        raise _create_error(folder, "status.jsonl", error) from error


def check_supervisor(folder: RunFolder) -> None:
    """Check supervisor.json if it exists. Raises ``ValueError``, or ``OSError`` if it cannot be read."""
    try:
        _check_types(parse_object(load_json(folder.supervisor)), _SUPERVISOR)
    except FileNotFoundError:
        return
    except (ValueError, RecursionError) as error:
        raise _create_error(folder, "supervisor.json", error) from error


def shorten_message(folder: RunFolder, error: Exception) -> str:
    """Return the message of ``error`` without the path of ``folder``, for table rows that show its name."""
    message = str(error) if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {error}"
    return message.replace(f"{folder.path}{os.sep}", "")


def _create_error(folder: RunFolder, name: str, error: Exception) -> ValueError:
    # Errors from below may already say "is damaged": keep only their reason.
    reason = str(error).partition(" is damaged: ")[2] or str(error)
    if isinstance(error, OSError) and error.strerror:
        reason = f"it cannot be read: {error.strerror}"
    if isinstance(error, RecursionError):
        reason = "it is nested too deeply"
    fix = "Nearest fix: attach another run, or restore the file."
    return ValueError(f"{folder.path / name} is damaged: {reason.rstrip('.')}. {fix}")


def _format_value(value: object) -> str:
    # Untrusted values go into messages escaped and shortened.
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _check_types(record: Mapping[str, object], checks: Mapping[str, Callable[[object], bool]]) -> None:
    """Check the types of present values; records of older versions lack some."""
    for name, is_right in checks.items():
        value = record.get(name)
        if value is not None and not is_right(value):
            raise ValueError(f"its {name} is {_format_value(value)}")


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_mapping(value: object) -> bool:
    return isinstance(value, dict)


def _build_list_check(is_right: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(map(is_right, value))


_DESCRIPTION: Mapping[str, Callable[[object], bool]] = {
    **dict.fromkeys(("name", "asked_name", "machine", "task", "device", "pythonpath", "scheduler"), _is_text),
    **dict.fromkeys(("trains_the_plan", "saves_when_asked", "outlive_kernel"), _is_flag),
    **dict.fromkeys(("predicted", "asked", "versions", "on"), _is_mapping),
    **dict.fromkeys(("num_steps", "num_nodes", "retries"), is_int),
    "gpus": _build_list_check(is_int),
    "sys_path": _build_list_check(_is_text),
}
"""Value checks of run.json. The plan is checked by :meth:`shardscope.Plan.from_json` instead: a run with an
unreadable plan can still be opened."""
_TRANSITION: Mapping[str, Callable[[object], bool]] = {
    "time": is_number,
    "reason": _is_text,
    "error": _is_text,
    "hangs": _is_flag,
}
_SUPERVISOR: Mapping[str, Callable[[object], bool]] = {
    "pid": is_int,
    "started": is_number,
    "machine": _is_text,
}
