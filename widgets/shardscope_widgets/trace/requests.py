"""Requests of the front end, and their validation."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from shardscope.trace import Trace
from shardscope.trace.tiles import MAX_WIDTH

MAX_NAMES = 5_000


class RequestError(ValueError):
    """The error for a malformed message, which this view's front end never sends."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A validated message; fields that its type does not use keep their defaults."""

    type: str
    id: int = 0
    t0_ns: float = 0.0
    t1_ns: float = 0.0
    width: int = 0
    index: int | None = None
    indices: list[int] = field(default_factory=list)
    direction: int = 1


_FIELDS = {
    "tile": {"t0_ns", "t1_ns", "width"},
    "totals": {"t0_ns", "t1_ns"},
    "names": {"indices"},
    "select": {"index"},
    "find": {"direction"},
}


def read_request(content: Any, trace: Trace, span_ns: int) -> Request:
    """Return the request in ``content``. Raises :class:`RequestError` naming the invalid field."""
    if not isinstance(content, dict):
        raise RequestError(f"A message was {type(content).__name__}; allowed: an object.")
    kind = content.get("type")
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise RequestError(f"A message of type {str(kind)[:40]!r}; allowed: {', '.join(_FIELDS)}.")
    wanted = _FIELDS[kind] | {"type", "id"}
    if set(content) != wanted:
        raise RequestError(f"A {kind} message needs exactly {', '.join(sorted(wanted))}.")
    values = {"id": _whole(content, "id", 0, 2**53)}
    if "t0_ns" in wanted:
        values |= _stretch(content, span_ns)
    if "width" in wanted:
        values["width"] = _whole(content, "width", 1, MAX_WIDTH)
    if "index" in wanted and content["index"] is not None:
        values["index"] = _whole(content, "index", 0, len(trace) - 1)
    if "indices" in wanted:
        values["indices"] = _indices(content["indices"], len(trace.names))
    if "direction" in wanted:
        values["direction"] = 1 if _whole(content, "direction", -1, 1) >= 0 else -1
    return Request(type=kind, **values)


def _stretch(content: dict[str, Any], span_ns: int) -> dict[str, Any]:
    t0, t1 = content["t0_ns"], content["t1_ns"]
    numbers = all(
        isinstance(t, int | float) and not isinstance(t, bool) and math.isfinite(t) for t in (t0, t1)
    )
    if not numbers or not -10 * span_ns <= t0 < t1 <= 11 * span_ns:
        raise RequestError(
            f"A stretch was {str(t0)[:40]} to {str(t1)[:40]} ns; allowed: around 0 to {span_ns:,}."
        )
    return {"t0_ns": float(t0), "t1_ns": float(t1)}


def _whole(content: dict[str, Any], key: str, low: int, high: int) -> int:
    value = content[key]
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(f"{key} was {str(value)[:40]}; allowed: a whole number from {low:,} to {high:,}.")
    return value


def _indices(value: Any, size: int) -> list[int]:
    if not isinstance(value, list) or len(value) > MAX_NAMES:
        raise RequestError(f"indices was not a list of at most {MAX_NAMES:,} numbers.")
    if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < size for i in value):
        raise RequestError(f"indices held something else than whole numbers from 0 to {size - 1:,}.")
    return value
