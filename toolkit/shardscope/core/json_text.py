"""Parsing of hand-edited JSON: errors with line numbers, and the lines of all keys."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from shardscope.core.text_positions import KeyPath

MAX_DEPTH = 64
"""Deepest nesting allowed, checked before any recursion; real configurations have four or five levels."""

# An unterminated string matches to the end of the text, so the regex never backtracks over it.
_TOKENS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}:\n]', re.DOTALL)
# Each alternative also matches what has no end, for the same reason.
_COMMENTS = re.compile(r'"[^"\\\n]*(?:\\.[^"\\\n]*)*"?|//[^\n]*|#[^\n]*|/\*[\s\S]*?(?:\*/|\Z)')
_TRAILING_COMMAS = re.compile(r'"[^"\\\n]*(?:\\.[^"\\\n]*)*"?|,(?=\s*[}\]])')


class _DuplicateKeyError(Exception):
    """Duplicate key in a JSON object."""


def parse_json(name: str, text: str) -> object:
    """Parse a JSON text; ``name`` is its name in messages.

    Raises ``ValueError`` with the line for invalid JSON and duplicate keys, and ``RecursionError`` for
    nesting beyond Python's limit (call :func:`check_depth` first to avoid that).
    """
    try:
        value: object = json.loads(text, object_pairs_hook=_reject_duplicate_keys)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name}, line {error.lineno}, column {error.colno}: {error.msg}.") from error
    except _DuplicateKeyError:
        # The parser reached the duplicate, so the text before it is valid JSON and can be scanned.
        line, key = next((line, key) for line, key, _, is_again in _scan_keys(text) if is_again)
        raise ValueError(
            f"{name}, line {line}, {key}: duplicate key {key!r}; remove one of the two."
        ) from None
    except ValueError as error:  # a number of more than sys.get_int_max_str_digits() digits
        raise ValueError(f"{name}: {error}.") from error
    return value


def blank_comments(text: str) -> str:
    """Return the text with spaces for comments (``#``, ``//``, ``/* */``) and trailing commas.

    Lines and columns stay, and JSON without them is returned as it is.
    """
    return _TRAILING_COMMAS.sub(_blank, _COMMENTS.sub(_blank, text))


def _blank(match: re.Match[str]) -> str:
    token = match[0]
    return token if token.startswith('"') else re.sub(r"[^\n]", " ", token)


def check_depth(name: str, text: str) -> None:
    """Raise ``ValueError`` for nesting beyond :data:`MAX_DEPTH`, in one pass over the text."""
    depth, line = 0, 1
    for token in _TOKENS.findall(text):
        depth += token in "[{"
        depth -= token in "]}"
        line += token == "\n"
        if depth > MAX_DEPTH:
            raise ValueError(
                f"{name}, line {line}: nested too deeply for a configuration; allowed: {MAX_DEPTH} levels."
            )


def find_key_lines(text: str) -> dict[KeyPath, int]:
    """Return the line number of each key of a JSON text by its path; keys inside lists are omitted."""
    return {path: line for line, _, path, _ in _scan_keys(text) if path is not None}


def _scan_keys(text: str) -> Iterator[tuple[int, str, KeyPath | None, bool]]:
    """Yield line, key, key path (None inside lists), and whether the key is a duplicate in its object."""
    path: list[str | None] = []
    keys_by_level: list[set[str]] = []
    line, last_string = 1, ("", 1)
    for token in _TOKENS.findall(text):
        if token == "\n":
            line += 1
        elif token in "{[":
            path.append("" if token == "{" else None)
            keys_by_level.append(set())
        elif token in "]}":
            path.pop()
            keys_by_level.pop()
        elif token == ":":
            key = json.loads(last_string[0], strict=False)
            path[-1] = key
            keys = tuple(part for part in path if part is not None) if len(path) <= MAX_DEPTH else ()
            yield last_string[1], key, keys if len(keys) == len(path) else None, key in keys_by_level[-1]
            keys_by_level[-1].add(key)
        else:
            last_string = token, line
            line += token.count("\n")


def _reject_duplicate_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    # json.loads without a hook keeps the last value silently.
    values = dict(pairs)
    if len(values) < len(pairs):
        raise _DuplicateKeyError
    return values
