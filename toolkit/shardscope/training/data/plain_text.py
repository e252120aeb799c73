"""Check that a text file is plain text, so that structured data is not trained on as characters.

From a file of chats, a language model would learn braces, quotes and keys, and its loss would still fall.
"""

from __future__ import annotations

import json
from pathlib import Path

from shardscope.core.errors import Value, refuse
from shardscope.training.examples.file_rows import check_is_utf8

STRUCTURED_SUFFIXES = {
    ".jsonl": "JSON lines",
    ".ndjson": "JSON lines",
    ".json": "JSON",
    ".csv": "comma-separated values",
    ".tsv": "tab-separated values",
    ".parquet": "Parquet",
    ".arrow": "Arrow",
    ".feather": "Arrow",
    ".avro": "Avro",
    ".xlsx": "a spreadsheet",
    ".db": "a database",
    ".sqlite": "a database",
}
BINARY_BEGINNINGS = {
    b"PAR1": "Parquet",
    b"ARROW1": "Arrow",
    b"Obj\x01": "Avro",
    b"PK\x03\x04": "a zip archive",
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"%PDF": "PDF",
    b"SQLite format 3": "a database",
}
"""Magic bytes of binary formats, by their specifications."""
READ_BYTES = 64 * 2**10
ALLOWED = (
    "a plain UTF-8 text file. Structured data is not text: Finetune(data=...) reads examples from JSONL, "
    "JSON, CSV and Parquet files"
)
FIX = "write the text of its rows to a .txt file, or None for Moby-Dick"
MAX_TEXT_BYTES = 2**30
"""Maximum size of a text: every rank tokenizes all of it at the start of a run."""


def check_is_plain_text(field: str, path: Path) -> None:
    """Raise ``ValueError``, naming ``field``, if ``path`` holds structured data or a binary format."""
    kind = STRUCTURED_SUFFIXES.get(path.suffix.lower()) or _detect_format(path)
    if kind is not None:
        refuse(field, str(path), ALLOWED, FIX, f"{path.name} is {kind}, not plain text")


def check_can_be_read(field: str, path: Path) -> None:
    """Raise ``ValueError``, naming ``field``, for a text that is missing, empty, over 1 GiB or not in UTF-8.

    It reads all of the file.
    """
    if not path.is_file():
        refuse(field, str(path), "a text file, or None for the shipped corpus", Value(None))
    size = path.stat().st_size
    if not size:
        refuse(field, str(path), "a text with words in it: this file is empty", "a file that has some")
    if size > MAX_TEXT_BYTES:
        refuse(field, f"{path} of {size:,} bytes", f"at most {MAX_TEXT_BYTES:,} bytes", "a part of it")
    check_is_utf8(field, path)


def _detect_format(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            data = file.read(READ_BYTES)
    except OSError:  # The reader of the file reports the reason.
        return None
    # The content decides where the suffix does not: data is often in files named .txt.
    for beginning, kind in BINARY_BEGINNINGS.items():
        if data.startswith(beginning):
            return kind
    # Read only the beginning, whose last character may be cut: replace it rather than fail.
    lines = [line for line in data.decode("utf-8-sig", errors="replace").splitlines() if line.strip()]
    if lines and _is_record(lines[0]):
        return "JSON lines"
    # A JSON document on several lines: a list of records, or one object.
    if len(lines) > 1 and lines[0].strip() in ("[", "{") and lines[1].lstrip()[:1] in '{"[':
        return "JSON"
    return None


def _is_record(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict | list)
    except ValueError:
        return False
