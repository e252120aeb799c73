"""Splitting of a trace's text into header, chunks of whole events and footer, without decoding the events.

A file is never in memory as a whole, and its chunks decode independently: a malformed event costs the fast
path for one chunk only, and other processes can decode chunks.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import NoReturn

import msgspec

from shardscope.trace.files import TextStream, refuse_file

CHUNK_BYTES = 8 * 1024**2
MAX_EVENT_BYTES = 64 * 1024**2
"""Longest text without the end of an event, and longest header; real ones have kilobytes."""
_FIRST_WINDOW_BYTES = 16 * 1024
_MAX_CHECKED = 50
MAX_PARTS = 8
"""Most parts of an event that are tried together, split at objects in its arguments that look like events."""
_MAX_BRACKETS = 1000
_UNREADABLE_BLOCKS = f"blocks of {MAX_EVENT_BYTES // 1024**2} MiB without a readable event left out"

READ_UP_TO_THERE = ", read up to there"
"""End of the notes on files that lack events: those that end in the middle, and damaged gzip files."""

UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Exceptions of msgspec's decoders."""

FIX = "give what torch.profiler exported, a .json or .json.gz file"
"""Fix of a file that is not a trace."""

EVENT_BOUNDARY = re.compile(rb'(?<=\})\s*,\s*(?=\{\s*"(?:ph|name|cat|pid|tid|ts|dur|args|id|bp|s)"\s*:)')
"""The comma between two events. It may also be inside of an event's arguments, which have to be checked."""
_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_LIST_END = re.compile(rb'\]\s*(?=,\s*"|\}\s*$)')


def is_cut_off(oddities: Mapping[str, int]) -> bool:
    """Return whether notes, with their numbers, say that a file ends in the middle."""
    return any(number and what.endswith(READ_UP_TO_THERE) for what, number in oddities.items())


class EventText:
    """The events of one file as chunks of text, and the text around them."""

    def __init__(self, stream: TextStream, oddities: Counter[str]) -> None:
        """Read the header. Raises ``ValueError`` if the file is not a trace."""
        self.header = b""
        """Text before the events; with ``]}`` it is a JSON object. Empty in a list of events."""
        self.footer = b""
        """Text after the events, such as ``, "traceName": "x"}``."""
        self.beginning = b""
        """First piece of the text: all of a small file."""
        self._stream = stream
        self._oddities = oddities
        self._rest = self._read_header()

    def _read_header(self) -> bytes:
        """Return the text after the header."""
        text = self._stream.read(CHUNK_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
        self.beginning = text
        # Chrome's format is an object with traceEvents, or the list alone, which some exporters write.
        if text.startswith(b"["):
            return text[1:]
        while True:
            first: re.Match[bytes] | None = None
            for match in _EVENTS_KEY.finditer(text):
                # "traceEvents" may also be inside of a string of the header.
                if _is_json(text[: match.end()] + b"]}"):
                    self.header = text[: match.end()]
                    return text[match.end() :]
                first = first or match
            if first is not None and _begins_with_event(first.end(), text):
                self._oddities["header that is not JSON read in parts"] += 1
                self.header = text[: first.end()]
                return text[first.end() :]
            piece = self._stream.read(CHUNK_BYTES)
            if not piece or len(text) > MAX_EVENT_BYTES:
                refuse_text(self._stream, text)
            text += piece

    def __iter__(self) -> Iterator[bytes]:
        """Yield texts of whole events, separated by commas, then read the footer."""
        while piece := self._stream.read(CHUNK_BYTES):
            if not piece.strip() and self._rest.rstrip()[-1:] in (b"]", b"}", b","):
                # Padding between values, which must not count as a part of an event.
                self._rest = self._rest.rstrip()
                continue
            text = self._rest + piece
            # Without the beginning of an object there is no new boundary, so a long string is not searched.
            boundary = _find_last_boundary(text) if b"{" in piece else None
            if boundary is not None:
                end, begin = boundary
                yield text[:end]
                self._rest = text[begin:]
            elif len(text) > MAX_EVENT_BYTES:
                self._oddities[_UNREADABLE_BLOCKS] += 1
                self._rest = b""
            else:
                self._rest = text
        last = self._rest
        self._rest = b""
        list_end = _find_list_end(last, is_list=not self.header)
        if list_end is None:
            self._oddities[f"file that ends in the middle{READ_UP_TO_THERE}"] += 1
            yield last
        else:
            self.footer = last[list_end + 1 :]
            yield last[:list_end]


def refuse_text(stream: TextStream, text: bytes) -> NoReturn:
    """Raise ``ValueError`` that says why ``text``, the beginning of a file, is not a trace with events."""
    data = parse_text(stream, text)
    what = "has no traceEvents: it is not a profiler trace"
    if isinstance(data, dict) and "traceEvents" in data:
        what = "holds no traceEvents list: it is not a profiler trace"
    refuse_file(stream.path, what, FIX)


def parse_text(stream: TextStream, text: bytes) -> object:
    """Return the JSON value of a file. Raises ``ValueError`` that says why it is none."""
    path, again = stream.path, "record it again; the rank was probably killed while writing"
    if stream.damage:
        refuse_file(path, stream.damage, again)
    try:
        return json.loads(text.decode("utf-8-sig", errors="replace"), strict=False)
    except json.JSONDecodeError as error:
        where = f"{error.msg} at line {error.lineno:,}, column {error.colno:,}"
        # A rank that was killed leaves the beginning of a trace, or zeros: other text is of another file.
        is_begun = text.strip(b"\0 \r\n\t")[:1] in (b"", b"{", b"[")
        refuse_file(path, f"is not JSON: {where}", again if is_begun else FIX)
    except (RecursionError, ValueError) as error:
        refuse_file(path, f"is not a profiler trace ({error})", FIX)


def is_event(text: bytes) -> bool:
    """Return whether ``text`` is one event: a JSON object with a phase."""
    try:
        return msgspec.json.decode(text, type=_Phase).ph != ""
    except UNREADABLE:
        pass
    try:
        data = json.loads(text, strict=False)  # with NaN or invalid UTF-8
    except (ValueError, RecursionError):
        return False
    return isinstance(data, dict) and bool(data.get("ph"))


class _Phase(msgspec.Struct):
    ph: str = ""


def _is_json(text: bytes) -> bool:
    try:
        msgspec.json.decode(text)
    except UNREADABLE:
        return False
    return True


def _begins_with_event(begin: int, text: bytes) -> bool:
    """Return whether the list of events begins at ``begin``, whatever is wrong with the text before."""
    return re.match(rb'\s*(?:\{\s*"|\]|$)', text[begin : begin + 4096]) is not None


def _find_last_boundary(text: bytes) -> tuple[int, int] | None:
    """Return where the last but one event ends and the last one begins; None without a sure boundary.

    A boundary inside of arguments has no whole event before it: one with an event before it is sure.
    """
    window = _FIRST_WINDOW_BYTES
    while True:
        first = max(len(text) - window, 0)
        spans = [match.span() for match in EVENT_BOUNDARY.finditer(text, first)]
        # The event before a boundary begins at the boundary before, or further back if there are objects with
        # the same keys in its arguments.
        for last in range(len(spans) - 1, max(len(spans) - _MAX_CHECKED, 0), -1):
            for before in range(last - 1, max(last - 1 - MAX_PARTS, -1), -1):
                if is_event(text[spans[before][1] : spans[last][0]]):
                    return spans[last]
        if first == 0:
            return None
        window *= 16


def _find_list_end(text: bytes, *, is_list: bool) -> int | None:
    """Return the position of the bracket that ends the events; None if the file was truncated."""
    if is_list:
        stripped = text.rstrip()
        return len(stripped) - 1 if stripped.endswith(b"]") else None
    # The footer follows the last event, and has no event in it.
    boundary = _find_last_boundary(text)
    begin = boundary[1] if boundary else 0
    # The first bracket after which the rest of the document is JSON; later ones may belong to the footer.
    for match in islice(_LIST_END.finditer(text, begin), _MAX_BRACKETS):
        if _is_json(b'{"traceEvents":[]' + text[match.end() :]):
            return match.start()
    return None
