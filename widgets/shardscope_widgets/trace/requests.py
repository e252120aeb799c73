"""Requests of the front end, and their validation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shardscope.records.json_values import is_number
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
    tracks: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    counters: list[int] = field(default_factory=list)
    wants_path: bool = False
    count: int = 1
    direction: int = 1


_FIELDS = {
    "tile": {"t0_ns", "t1_ns", "width", "rows", "counters", "wants_path"},
    "totals": {"t0_ns", "t1_ns"},
    "names": {"indices"},
    "select": {"index"},
    "pick": {"index", "count"},
    "mark": {"index", "count"},
    "find": {"direction"},
    "area": {"t0_ns", "t1_ns", "tracks"},
    "download": set(),
}


def read_request(content: object, trace: Trace, span_ns: int, num_counters: int) -> Request:
    """Return the request in ``content``. Raises :class:`RequestError` naming the invalid field."""
    if not isinstance(content, dict):
        raise RequestError(f"A message was {type(content).__name__}; allowed: an object.")
    kind = content.get("type")
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise RequestError(f"A message of type {str(kind)[:40]!r}; allowed: {', '.join(_FIELDS)}.")
    fields = _FIELDS[kind] | {"type", "id"}
    if set(content) != fields:
        raise RequestError(f"A {kind} message needs exactly {', '.join(sorted(fields))}.")
    request = Request(type=kind, id=_read_whole_number(content, "id", 0, 2**53))
    if "t0_ns" in fields:
        t0_ns, t1_ns = _read_interval(content, span_ns)
        request = replace(request, t0_ns=t0_ns, t1_ns=t1_ns)
    if "width" in fields:
        request = replace(request, width=_read_whole_number(content, "width", 1, MAX_WIDTH))
    if kind in ("mark", "pick") or ("index" in fields and content["index"] is not None):
        request = replace(request, index=_read_whole_number(content, "index", 0, len(trace) - 1))
    if "indices" in fields:
        request = replace(request, indices=_read_indices(content, "indices", len(trace.names), MAX_NAMES))
    if "tracks" in fields:
        size = len(trace.tracks)
        request = replace(request, tracks=_read_indices(content, "tracks", size, size))
    if "count" in fields:
        most = len(trace) - (request.index or 0)
        request = replace(request, count=_read_whole_number(content, "count", 1, most))
    if "rows" in fields:
        num_rows = int(trace.first_row_of_track[-1])
        request = replace(
            request,
            rows=_read_indices(content, "rows", num_rows, num_rows),
            counters=_read_indices(content, "counters", num_counters, num_counters),
            wants_path=_read_flag(content, "wants_path"),
        )
    if "direction" in fields:
        is_forward = _read_whole_number(content, "direction", -1, 1) >= 0
        request = replace(request, direction=1 if is_forward else -1)
    return request


def _read_interval(content: Mapping[str, object], span_ns: int) -> tuple[float, float]:
    t0, t1 = content["t0_ns"], content["t1_ns"]
    if is_number(t0) and is_number(t1) and -10 * span_ns <= t0 < t1 <= 11 * span_ns:
        return float(t0), float(t1)
    raise RequestError(
        f"An interval was {str(t0)[:40]} to {str(t1)[:40]} ns; allowed: around 0 to {span_ns:,}."
    )


def _read_whole_number(content: Mapping[str, object], key: str, low: int, high: int) -> int:
    value = content[key]
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(f"{key} was {str(value)[:40]}; allowed: a whole number from {low:,} to {high:,}.")
    return value


def _read_flag(content: Mapping[str, object], key: str) -> bool:
    value = content[key]
    if not isinstance(value, bool):
        raise RequestError(f"{key} was {str(value)[:40]}; allowed: true or false.")
    return value


def _read_indices(content: Mapping[str, object], key: str, size: int, most: int) -> list[int]:
    value = content[key]
    if not isinstance(value, list) or len(value) > most:
        raise RequestError(f"{key} was not a list of at most {most:,} numbers.")
    if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < size for i in value):
        raise RequestError(f"{key} has other values than whole numbers from 0 to {size - 1:,}.")
    return value
