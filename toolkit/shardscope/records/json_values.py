"""Parsing of untrusted JSON: bounded nesting, and no number beyond float range."""

from __future__ import annotations

import json
import math
from typing import NoReturn, TypeGuard

from shardscope.core.json_text import MAX_DEPTH, check_depth

MAX_INT = 10**17
"""Larger integers become floats; no count of bytes, steps or processes is that large."""


def parse_object(data: bytes) -> dict[str, object]:
    """Return the JSON object in ``data``; invalid UTF-8 becomes the replacement character.

    Integers of more than 17 digits become floats. Raises ``ValueError`` for anything but an object, for
    numbers beyond float range and for nesting beyond :data:`shardscope.core.json_text.MAX_DEPTH`.
    """
    # Count brackets first: it is fast, and only a text with very many of them can be nested too deeply.
    text = data.decode(errors="replace")
    if data.count(b"{") + data.count(b"[") > MAX_DEPTH:
        check_depth("JSON", text)
    value = _DECODER.decode(text)
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def is_int(value: object) -> TypeGuard[int]:
    """Return whether ``value`` is an integer and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether ``value`` is a finite number and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _parse_int(digits: str) -> int | float:
    # Checked before int(), which takes seconds for a million digits, or raises ValueError.
    if len(digits) > len(str(MAX_INT)):
        return _parse_float(digits)
    number = int(digits)
    return number if abs(number) < MAX_INT else float(number)


def _parse_float(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        _refuse_number(f"{digits[:20]}{'...' * (len(digits) > 20)}")
    return number


def _refuse_number(number: str) -> NoReturn:
    raise ValueError(f"the number {number} is beyond the range of floats")


_DECODER = json.JSONDecoder(parse_int=_parse_int, parse_float=_parse_float, parse_constant=_refuse_number)
