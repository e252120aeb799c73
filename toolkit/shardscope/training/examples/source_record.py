"""Record of a run's data: name, SHA-256 and size of a source, for the model card. Imports no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from shardscope.records.folder import RunFolder
from shardscope.records.json_files import read_json, write_json
from shardscope.training.checkpoints.folders import POSITION_FILE
from shardscope.training.examples.folder_files import ARROW_STATE, find_files
from shardscope.training.examples.rows import describe_source
from shardscope.training.examples.token_table import IDS, LOSS, RowCounts

COUNTS = "counts.json"
"""File next to the tokens of examples, with the numbers of :class:`RowCounts`."""


def save_counts(folder: Path, counts: RowCounts) -> None:
    """Write the numbers of ``counts`` into a folder of tokens; its texts quote rows, and are left out."""
    write_json(folder / COUNTS, {name: value for name, value in asdict(counts).items() if is_count(value)})


def save_shared_count(folder: Path, num_shared: int) -> None:
    """Add to the numbers of validation examples how many of them are trained on as well."""
    write_json(folder / COUNTS, {**(read_json(folder / COUNTS) or {}), "num_shared_examples": num_shared})


def describe_file(source: Path) -> dict[str, object]:
    """Return the name and the SHA-256 of a file or a folder of files."""
    return {
        "name": source.name,
        "sha256": hash_path(source),
        "hashed": "file" if source.is_file() else "folder",
    }


def describe_examples(source: object, folder: Path) -> dict[str, object]:
    """Return the name, the SHA-256 and the counts of examples whose tokens are in ``folder``.

    The hash is that of the source's file or files, or that of the tokens and their loss mask if the source is
    an object or a data set of the Hub.
    """
    counts = read_json(folder / COUNTS) or {}
    if isinstance(source, Path):
        return {**describe_file(source), **counts}
    digest = hashlib.sha256()
    for name in (IDS, LOSS):
        digest.update(_hash_file(folder / name).encode())
    return {"name": describe_source(source), "sha256": digest.hexdigest(), "hashed": "tokens", **counts}


def select_identity(source: Mapping[str, object]) -> dict[str, object]:
    """Return what identifies the data ``source``, for their checkpoints: name and SHA-256, without counts."""
    return {name: source[name] for name in ("name", "sha256", "hashed") if name in source}


def describe_changed_data(checkpoint: Path, source: Mapping[str, object]) -> str:
    """Return how the data ``source`` differ from those of the run that saved ``checkpoint``.

    A sentence, empty if they are the same or if it is not known.
    """
    before = (read_json(checkpoint / POSITION_FILE) or {}).get("data_source")
    if before is None:
        # Older versions recorded it with the run alone.
        saving_run = RunFolder(checkpoint.parent.parent)
        before = (read_json(saving_run.engine_report(0)) or {}).get("data_source")
    if not isinstance(before, dict) or not all("sha256" in record for record in (before, source)):
        return ""
    if before.get("hashed") != source.get("hashed") or before["sha256"] == source["sha256"]:
        return ""
    names = (before.get("name"), source.get("name"))
    what = f"{names[0]} has changed" if names[0] == names[1] else f"{names[1]} is not {names[0]}"
    return (
        f"the data are not those of the run that saved the checkpoint: {what} (SHA-256 "
        f"{str(before['sha256'])[:12]} before, {str(source['sha256'])[:12]} now). The steps continue at "
        "their number, so some of the data may be read again, and some never"
    )


def hash_path(path: Path) -> str:
    """Return the SHA-256 of a file, as ``sha256sum`` prints it.

    Of a folder, that of the lines that ``sha256sum`` prints for the files that are read.
    """
    if path.is_file():
        return _hash_file(path)
    digest = hashlib.sha256()
    is_saved = (path / ARROW_STATE).is_file()
    for file in sorted(path.glob("*.arrow")) if is_saved else find_files(path):
        digest.update(f"{_hash_file(file)}  {file.name}\n".encode())
    return digest.hexdigest()


def is_count(value: object) -> bool:
    """Return whether ``value`` is a whole number from 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
