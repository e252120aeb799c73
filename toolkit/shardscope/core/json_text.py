"""JSON that people edit: what is wrong with a text, and where its keys stand, are told by line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from shardscope.core.text_positions import Keys

MAX_DEPTH = 64
"""Real ones nest four or five deep; what nests for ever is refused before anything recurses into it."""

# A string that does not end is one token to the end of the text: nothing is read twice.
_TOKENS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}:\n]', re.DOTALL)


class _TwiceError(Exception):
    """An object of the text has a key twice."""


def parse_json(name: str, text: str) -> Any:
    """The value of a JSON text, which messages call ``name``.

    Raises ``ValueError`` with the line for what is no JSON and for keys that stand twice, and
    ``RecursionError`` for what nests deeper than Python reads (:func:`check_depth` says it sooner).
    """
    try:
        return json.loads(text, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name}, line {error.lineno}, column {error.colno}: {error.msg}.") from error
    except _TwiceError:
        # What came before the second one was read, and so is JSON.
        line, key = next((line, key) for line, key, _, is_again in _keys(text) if is_again)
        raise ValueError(
            f"{name}, line {line}, {key}: the key {key!r} stands twice; keep one of the two."
        ) from None
    except ValueError as error:  # a number of more digits than Python reads
        raise ValueError(f"{name}: {error}.") from error


def check_depth(name: str, text: str) -> None:
    """Refuse objects and lists inside each other beyond :data:`MAX_DEPTH`, in one pass over the text."""
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
    """On which line each key of a JSON text stands; those inside lists have no way to them."""
    return {way: line for line, _, way, _ in _keys(text) if way is not None}


def _keys(text: str) -> Iterator[tuple[int, str, Keys | None, bool]]:
    """Line, key, the way to it, and whether its object has it already."""
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
