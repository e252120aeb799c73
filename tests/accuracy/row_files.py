"""A file of rows -> JSON objects, or words for each line that is none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def objects(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Line numbers of a file, each with its object, or with why it has none; empty lines are left out.

    Lines end where JSON lines do: a sign that other readers take for an end may stand within a text. A file
    that is one JSON list counts its elements. Bytes that are no UTF-8 make a line no row, not a file no file.
    """
    whole = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if whole.lstrip()[:1] == b"[":
        found = _parsed(whole)
        if isinstance(found, list):
            yield from ((number, _object(element)) for number, element in enumerate(found, start=1))
            return
    for number, line in enumerate(whole.split(b"\n"), start=1):
        if line.strip():
            yield number, _object(_parsed(line))


class _Broken(str):
    """An error message for a line that could not be read."""


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text.decode("utf-8"))
    except UnicodeDecodeError:
        return _Broken("is no UTF-8 text")
    except (ValueError, RecursionError) as error:
        return _Broken(f"is no JSON: {error}")


def _object(found: Any) -> dict[str, Any] | str:
    if isinstance(found, dict):
        return found
    return str(found) if isinstance(found, _Broken) else "is no JSON object"
