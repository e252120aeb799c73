"""Events of a chunk of text: the fast typed decode, and salvage event by event where it fails."""

from __future__ import annotations

import json
import re
from collections import Counter

import msgspec

from shardscope.trace.loading.splitting import EVENT_BOUNDARY, MAX_PARTS, UNREADABLE

NO_ARGS = msgspec.Raw(b"")
LENIENT = "events read leniently because of text that is not strict JSON"
MALFORMED = "malformed events left out"
TOO_DEEP = "events nested too deeply shown without their arguments"
REPAIRED = "events with an unescaped backslash repaired"


class Event(msgspec.Struct, gc=False):
    """One entry of ``traceEvents``. ``args`` stay undecoded bytes, which keeps a million events fast."""

    ph: str = ""
    name: str = ""
    cat: str = ""
    ts: float | None = None
    dur: float | None = None
    pid: int | str = ""
    tid: int | str = ""
    args: msgspec.Raw = NO_ARGS
    id: msgspec.Raw = NO_ARGS
    id2: msgspec.Raw = NO_ARGS


_STRICT = msgspec.json.Decoder(list[Event])
_LAX = msgspec.json.Decoder(Event, strict=False)  # some exporters write numbers as strings
_RAW = msgspec.json.Decoder(list[msgspec.Raw])

_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})|\\')
# A backslash that ends a string, as in "C:\dir\", escapes the quote: what follows looks like the next key.
_LAST_BACKSLASH = re.compile(r'(?<!\\)\\"(?=\s*(?:,\s*"(?:ph|name|cat|pid|tid|ts|dur|args|id|bp|s)"\s*:|\}))')
_SURROGATE = re.compile("[\ud800-\udfff]")
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_ARGS_KEY = re.compile(rb',\s*"args"\s*:')


def decode_events(text: bytes, oddities: Counter[str]) -> list[Event]:
    """Return the events of ``text``, which are separated by commas. Count what is left out or repaired."""
    text = b"[" + text + b"]"
    try:
        return _STRICT.decode(text)
    except UNREADABLE:
        pass
    try:
        pieces = _RAW.decode(text)
    except UNREADABLE:
        return _salvage_events(text[1:-1], oddities)
    events = [_decode_event(bytes(piece), oddities) for piece in pieces]
    if None in events:
        oddities[MALFORMED] += events.count(None)
    return [event for event in events if event is not None]


def _salvage_events(text: bytes, oddities: Counter[str]) -> list[Event]:
    """Return the events of text that is not JSON: split where one seems to end and the next to begin."""
    events: list[Event] = []
    text = text.strip().rstrip(b",")
    # A split may be inside arguments: a piece that is not an event is tried together with the next one.
    spans = [match.span() for match in EVENT_BOUNDARY.finditer(text)] if text else []
    begins = [0, *(end for _, end in spans)]
    ends = [*(begin for begin, _ in spans), len(text)]
    position = 0 if text else len(begins)
    while position < len(begins):
        candidates = range(position, min(position + MAX_PARTS, len(begins)))
        for last in candidates:
            try:
                events.append(_LAX.decode(text[begins[position] : ends[last]]))
            except UNREADABLE:
                continue
            break
        else:
            for last in candidates:
                event = _decode_event(text[begins[position] : ends[last]], oddities)
                if event is not None:
                    events.append(event)
                    break
            else:
                oddities[MALFORMED] += 1
                last = position
        position = last + 1
    return events


def _decode_event(text: bytes, oddities: Counter[str]) -> Event | None:
    """Return one event; None if nothing of it is readable."""
    try:
        return _LAX.decode(text)
    except RecursionError:
        return _decode_without_args(text, oddities)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        pass
    # NaN, Infinity, invalid UTF-8, which profilers have written (pytorch#130622), and lone surrogates, ...
    readable = text.decode("utf-8", errors="replace")
    event = _decode_leniently(readable)
    if event is not None:
        oddities[LENIENT] += 1
        return event
    # ... and paths of Windows, whose backslashes torch did not escape (pytorch#98432).
    event = _decode_leniently(_ESCAPE.sub(_double_backslash, readable)) or _decode_leniently(
        _ESCAPE.sub(_double_backslash, _LAST_BACKSLASH.sub(r'\\\\"', readable))
    )
    if event is not None:
        oddities[REPAIRED] += 1
        return event
    return _decode_without_args(text, oddities) if text.count(b"[") > _MAX_DEPTH else None


_MAX_DEPTH = 900
"""Brackets that json decodes inside of each other, somewhat below Python's recursion limit."""


def _double_backslash(match: re.Match[str]) -> str:
    return "\\\\" if match[0] == "\\" else match[0]


def _decode_leniently(text: str) -> Event | None:
    try:
        data = json.loads(text, strict=False)
        # Only where there may be one: walking the values takes a frame for each level of nesting.
        if _SURROGATE_ESCAPE.search(text):
            data = _replace_surrogates(data)
        return _LAX.decode(msgspec.json.encode(data))
    except (ValueError, OverflowError, *UNREADABLE):
        return None


def _replace_surrogates(value: object) -> object:
    """Return a JSON value with U+FFFD for each lone surrogate, such as a name cut inside of an emoji has."""
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [_replace_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_replace_surrogates(key): _replace_surrogates(item) for key, item in value.items()}
    return value


def _decode_without_args(text: bytes, oddities: Counter[str]) -> Event | None:
    """Return an event without its arguments, which are nested too deeply for any decoder."""
    match = _ARGS_KEY.search(text)
    if match is None:
        return None
    try:
        event = _LAX.decode(text[: match.start()] + b"}")
    except UNREADABLE:
        return None
    oddities[TOO_DEEP] += 1
    return event
