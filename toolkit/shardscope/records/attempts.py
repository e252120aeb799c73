"""Attempts of a run: it may be started several times, each time from the last checkpoint.

``attempts/<n>/`` has two files, each written once by the process that supervises the run (on a cluster
that of node 0): ``began.json`` before the ranks of attempt n start, and ``ended.json`` after they have ended.
A process that is killed writes no end. On Ray the coordinator writes the beginning, and the end if node 0 is
lost. Files of ranks and nodes that no two attempts share are in the run
folder for the first attempt, and in ``attempts/<n>/`` for later ones (``RunFolder.state``).
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path

from shardscope.records.folder import ATTEMPTS, FINAL, NodeFolder, RunFolder, list_numbers
from shardscope.records.json_files import read_json, read_lines, write_json
from shardscope.records.json_values import is_int, is_number
from shardscope.records.terminal_text import plain_text

BEGAN = "began.json"
ENDED = "ended.json"
MAX_ATTEMPTS = 10_000
"""Most attempts that are read of one run."""


def write_beginning(
    folder: RunFolder, *, checkpoint: Path | None, from_step: int, control_bytes: int
) -> None:
    """Create the folders of this attempt and write where it begins. Raises ``OSError``.

    ``checkpoint`` is in the run folder; None: the task starts as it was launched. Commands before byte
    ``control_bytes`` of ``control.jsonl`` were obeyed by an earlier attempt.
    """
    folder.create_attempt()
    record = {
        "time": time.time(),
        "checkpoint": None if checkpoint is None else str(checkpoint.relative_to(folder.path)),
        "from_step": from_step,
        "control_bytes": control_bytes,
    }
    write_json(folder.attempt_folder(folder.attempt) / BEGAN, record, as_is=("checkpoint",))


def write_end(folder: RunFolder, status: str, reason: str, **more: object) -> None:
    """Write how this attempt ended. Raises ``OSError``."""
    record = {"time": time.time(), "status": status, "reason": reason, **more}
    write_json(folder.attempt_folder(folder.attempt) / ENDED, record)


def has_begun(folder: RunFolder) -> bool:
    """Return whether the beginning of this attempt is recorded, so that its folders exist."""
    return (folder.attempt_folder(folder.attempt) / BEGAN).exists()


def has_ended(folder: RunFolder) -> bool:
    """Return whether the end of this attempt is recorded."""
    return read_json(folder.attempt_folder(folder.attempt) / ENDED) is not None


def has_final_status(folder: RunFolder) -> bool:
    """Return whether a final status of the run is recorded, after which it has no further attempt."""
    return any(record.get("status") in FINAL for record in read_lines(folder.status))


def read_checkpoint(folder: RunFolder) -> Path | None:
    """Return the checkpoint from which this attempt resumes; None if it starts as the run was launched."""
    name = (_read_began(folder) or {}).get("checkpoint")
    return folder.path / name if isinstance(name, str) else None


def read_control_bytes(folder: RunFolder) -> int:
    """Return the size of the part of ``control.jsonl`` that earlier attempts have obeyed."""
    return _to_int((_read_began(folder) or {}).get("control_bytes")) or 0


def find_obeyed_bytes(folder: RunFolder) -> int:
    """Return that size for an attempt that is about to begin, from the records of those before it."""
    for attempt in range(folder.attempt - 1, 0, -1):
        for name in (ENDED, BEGAN):
            record = read_json(folder.attempt_folder(attempt) / name)
            size = _to_int((record or {}).get("control_bytes"))
            if size is not None:
                return size
    return 0


def is_for_attempt(command: Mapping[str, object], folder: RunFolder) -> bool:
    """Return whether a command of ``control.jsonl`` is for this attempt; those of users are for all."""
    return command.get("attempt") in (None, folder.attempt)


def read_attempts(folder: RunFolder) -> list[dict[str, object]]:
    """Return the recorded attempts, oldest first; the fields are those of ``Run.attempts``."""
    numbers = list_numbers(folder.path / ATTEMPTS)[:MAX_ATTEMPTS]
    return [
        _describe_attempt(folder.select_attempt(number), is_latest=number == numbers[-1])
        for number in numbers
        if number > 0
    ]


def _describe_attempt(folder: RunFolder, *, is_latest: bool) -> dict[str, object]:
    began = _read_began(folder) or {}
    ended = read_json(folder.attempt_folder(folder.attempt) / ENDED)
    if ended is None and not is_latest:
        ended = _find_end_without_lead(folder)
    end = ended or {}
    status = end.get("status")
    return {
        "attempt": folder.attempt,
        "nodes": _list_node_names(folder),
        "began": _to_float(began.get("time")),
        "from_step": _to_int(began.get("from_step")) or 0,
        "checkpoint": _to_text(began.get("checkpoint")),
        "ended": _to_float(end.get("time")),
        "status": status if status in FINAL else None,
        "reason": _to_text(end.get("reason")),
        "error": _to_text(end.get("error")),
        "rank": _to_int(end.get("rank")),
        "node": _to_int(end.get("node")),
    }


def _find_end_without_lead(folder: RunFolder) -> dict[str, object]:
    """Return the end of an attempt by the files of other nodes, if node 0 has written none."""
    ends = [record for node in folder.list_nodes() if (record := read_json(node.ended)) is not None]
    failed = next((end for end in ends if end.get("status") == "failed"), None)
    if failed is not None:
        # Without node 0 a rank of another node only says that its connection was closed.
        reason = str(failed.get("reason"))
        # With its name only for those who have its record.
        if not re.search(r"\bnode 0( \(.*?\))? is lost", reason):
            lead = NodeFolder(folder.path, 0, attempt=folder.fixed_attempt).title
            reason = f"{lead} left no record of its end, so it was lost or killed; another node: {reason}"
        return {**failed, "reason": reason}
    reason = "it left no record of its end: a node was lost, or its processes were killed without notice"
    return {"status": "lost", "reason": reason}


def _list_node_names(folder: RunFolder) -> list[str]:
    names = [(read_json(node.node_json) or {}).get("name") for node in folder.list_nodes()]
    return [plain_text(name) for name in names if isinstance(name, str)]


def _read_began(folder: RunFolder) -> dict[str, object] | None:
    return read_json(folder.attempt_folder(folder.attempt) / BEGAN)


def _to_int(value: object) -> int | None:
    return value if is_int(value) and value >= 0 else None


def _to_float(value: object) -> float | None:
    return float(value) if is_number(value) else None


def _to_text(value: object) -> str | None:
    return plain_text(value) if isinstance(value, str) else None
