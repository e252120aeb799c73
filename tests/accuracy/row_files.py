"""A file of rows -> JSON objects, or words for each line that is none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_objects(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Yield line numbers, each with its object or the reason why it has none; empty lines are skipped.

    Lines end where JSON lines do: a sign that other readers take for an end may stand within a text. A file
    that is one JSON list counts its elements. Bytes that are no UTF-8 make a line no row, not a file no file.
    """
    whole = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if whole.lstrip()[:1] == b"[":
        found = _parse_line(whole)
        if isinstance(found, list):
            yield from ((number, _check_object(element)) for number, element in enumerate(found, start=1))
            return
    for number, line in enumerate(whole.split(b"\n"), start=1):
        if line.strip():
            yield number, _check_object(_parse_line(line))


class _Broken(str):
    """An error message for a line that could not be read."""


def _parse_line(text: bytes) -> Any:
    try:
        return json.loads(text.decode("utf-8"))
    except UnicodeDecodeError:
        return _Broken("is no UTF-8 text")
    except (ValueError, RecursionError) as error:
        return _Broken(f"is no JSON: {error}")


def _check_object(found: Any) -> dict[str, Any] | str:
    if isinstance(found, dict):
        return found
    return str(found) if isinstance(found, _Broken) else "is no JSON object"
