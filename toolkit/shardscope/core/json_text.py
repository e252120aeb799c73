"""Parsing of hand-edited JSON: errors with line numbers, and the lines of all keys."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from shardscope.core.text_positions import Keys

MAX_DEPTH = 64
"""Deepest nesting allowed, checked before any recursion; real configurations have four or five levels."""

# An unterminated string matches to the end of the text, so the regex never backtracks over it.
_TOKENS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}:\n]', re.DOTALL)


class _TwiceError(Exception):
    """Duplicate key in a JSON object."""


def parse_json(name: str, text: str) -> Any:
    """Parse a JSON text; ``name`` is its name in messages.

    Raises ``ValueError`` with the line for invalid JSON and duplicate keys, and ``RecursionError`` for
    nesting beyond Python's limit (call :func:`check_depth` first to avoid that).
    """
    try:
        return json.loads(text, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name}, line {error.lineno}, column {error.colno}: {error.msg}.") from error
    except _TwiceError:
        # The parser reached the duplicate, so the text before it is valid JSON and can be scanned.
        line, key = next((line, key) for line, key, _, is_again in _keys(text) if is_again)
        raise ValueError(
            f"{name}, line {line}, {key}: the key {key!r} stands twice; keep one of the two."
        ) from None
    except ValueError as error:  # a number of more than sys.get_int_max_str_digits() digits
        raise ValueError(f"{name}: {error}.") from error


def check_depth(name: str, text: str) -> None:
    """Raise ``ValueError`` for nesting beyond :data:`MAX_DEPTH`, in one pass over the text."""
    depth, line = 0, 1
    for token in _TOKENS.findall(text):
        depth += token in "[{"
        depth -= token in "]}"
        line += token == "\n"
        if depth > MAX_DEPTH:
            raise ValueError(
                f"{name}, line {line}: nested too deeply to be a configuration; allowed: {MAX_DEPTH} levels."
            )


def key_lines(text: str) -> dict[Keys, int]:
    """Return the line number of each key of a JSON text by its path; keys inside lists are omitted."""
    return {way: line for line, _, way, _ in _keys(text) if way is not None}


def _keys(text: str) -> Iterator[tuple[int, str, Keys | None, bool]]:
    """Yield line, key, key path (None inside lists), and whether the key is a duplicate in its object."""
    way: list[str | None] = []
    seen: list[set[str]] = []
    line, last = 1, ("", 1)
    for token in _TOKENS.findall(text):
        if token == "\n":
            line += 1
        elif token in "{[":
            way.append("" if token == "{" else None)
            seen.append(set())
        elif token in "]}":
            way.pop()
            seen.pop()
        elif token == ":":
            key = json.loads(last[0], strict=False)
            way[-1] = key
            keys = tuple(each for each in way if each is not None) if len(way) <= MAX_DEPTH else ()
            yield last[1], key, keys if len(keys) == len(way) else None, key in seen[-1]
            seen[-1].add(key)
        else:
            last = token, line
            line += token.count("\n")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _TwiceError
    return found
