"""``run.json`` as a handle on the run reads it."""

from __future__ import annotations

from typing import Any

from shardscope.runs.folder import RunFolder
from shardscope.runs.os_errors import describe_os_error
from shardscope.runs.records import read_present_json
from shardscope.validation import real_number, whole_number

MAX_WORLD_SIZE = 16_384
"""Ranks that a handle follows; a run.json with more is damaged."""


def read_description(folder: RunFolder) -> dict[str, Any]:
    """``run.json``, with the values a handle relies on checked. Raises ``ValueError`` in words."""
    try:
        # Not read before it is known to be a file: opening a pipe would wait for ever.
        record = read_present_json(folder.run_json) if folder.run_json.is_file() else None
    except OSError as error:
        raise ValueError(f"{folder.run_json} cannot be read now: {describe_os_error(error)}.") from error
    if record is None:
        raise ValueError(
            f"{folder.run_json} is damaged: it is no JSON object. "
            "Nearest fix: attach another run, or restore the file."
        )
    try:
        world_size = whole_number("world_size", record.get("world_size"), low=1, high=MAX_WORLD_SIZE)
        created = real_number("created", record.get("created", 0), low=0, high=1e12)
    except ValueError as error:
        raise ValueError(f"{folder.run_json} is damaged: {error}") from error
    return {**record, "world_size": world_size, "created": created}
