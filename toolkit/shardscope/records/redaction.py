"""Tokens and keys, kept out of everything that a run writes.

Records are cleaned before they are written. What ranks print goes to a file without a process between, so
that nothing is lost or held up; the supervisor overwrites secrets there, in place, a moment later.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import AnyStr

from shardscope.records.regular_files import open_to_change, size_of
from shardscope.records.secret_forms import KNOWN_FORMS, is_path, is_secret_name

MASK = "*"
MIN_LENGTH = 8
"""Shorter values are words that a log may rightly have."""
NAME_LENGTH = 64
"""Of texts up to that length it is kept how they are without secrets."""
CHUNK_BYTES = 2**20
OVERLAP_BYTES = 2**14
"""Of what was looked at, so much at the least is looked at again: a secret may be printed in two writes, and
a private key is known by its last line only."""
MAX_SECRET_BYTES = 2**16
"""Of what was looked at, no more is kept for forms: of a longer one that comes bit by bit the end shows."""
MARGIN_BYTES = 16
"""More than stands to the left of a secret and says whether it is one."""
PIECE_BYTES = 2**23
"""Cleaned in a fraction of a second."""


def secret_values(environment: Mapping[str, str]) -> list[str]:
    """The values in ``environment`` that are secrets by their names, the longest first."""
    # Names first: os.environ decodes every value that it gives.
    values = {environment.get(name, "") for name in environment if is_secret_name(name)}
    found = {value for value in values if len(value) >= MIN_LENGTH and not is_path(value)}
    return sorted(found, key=len, reverse=True)


_learned: set[str] = set()
"""Secrets of other processes' environments, and of this one's at other times; in memory only."""


def learn_secret(value: str) -> None:
    """Mask ``value`` from now on, unless it is too short, whether or not it is in the environment."""
    if len(value) >= MIN_LENGTH:
        _learned.add(value)


def known_secrets() -> list[str]:
    """Secrets in the environment, looked up anew each time, and those that were learned; longest first."""
    values = secret_values(os.environ)
    return sorted(_learned.union(values), key=len, reverse=True) if _learned else values


def redact(text: str) -> str:
    """``text`` with every secret overwritten by as many asterisks."""
    # Asked anew each time: a notebook sets its tokens whenever it likes.
    return text if len(text) < MIN_LENGTH else _redact(text, tuple(known_secrets()))


def redactor() -> Callable[[str], str]:
    """Return :func:`redact` for several texts at once, names that come again and again among them."""
    secrets: list[tuple[str, ...]] = []

    def clean(text: str) -> str:
        if len(text) < MIN_LENGTH:
            return text
        if not secrets:
            secrets.append(tuple(known_secrets()))
        return _redact_again(text, secrets[0]) if len(text) <= NAME_LENGTH else _redact(text, secrets[0])

    return clean


def _redact(text: str, secrets: tuple[str, ...]) -> str:
    forms = _text_forms(secrets)
    pieces, done = [], 0
    for start, end in sorted(found.span(1) for found in _secrets(text, forms)):
        if end > done:
            start = max(start, done)
            pieces += [text[done:start], MASK * (end - start)]
            done = end
    return "".join([*pieces, text[done:]])


_redact_again = functools.lru_cache(maxsize=1024)(_redact)


def _secrets(data: AnyStr, forms: Sequence[tuple[AnyStr, re.Pattern[AnyStr]]]) -> list[re.Match[AnyStr]]:
    """Where secrets are in ``data``: each is group 1; they may overlap."""
    return [found for literal, pattern in forms if literal in data for found in pattern.finditer(data)]


@functools.lru_cache(maxsize=8)
def _text_forms(values: tuple[str, ...]) -> tuple[tuple[str, re.Pattern[str]], ...]:
    known = {value: f"({re.escape(value)})" for value in values} | KNOWN_FORMS
    return tuple((literal, re.compile(pattern)) for literal, pattern in known.items())


@functools.lru_cache(maxsize=8)
def _byte_forms(values: tuple[str, ...]) -> tuple[tuple[bytes, re.Pattern[bytes]], ...]:
    return tuple(
        (os.fsencode(literal), re.compile(os.fsencode(pattern.pattern)))
        for literal, pattern in _text_forms(values)
    )


class LogCleaner:
    """Overwrites secrets in a file that others append to, byte for byte: nothing moves.

    What ends where the data end is overwritten at once, and may be only the beginning of more. So the last
    bytes are kept as they were written: however much later a secret goes on, its rest is overwritten as well.
    """

    def __init__(self, path: Path, secrets: Callable[[], list[str]] = known_secrets) -> None:
        """``secrets`` is called after the end of the file was looked up: it knows all that stands before."""
        self.path = path
        self.offset = 0
        self._secrets = secrets
        self._seen = b""
        """What stood before ``offset``, secrets included; in memory only."""

    def clean(self, max_bytes: int | None = None) -> int:
        """Look at what is new, at most ``max_bytes`` of it; how many secrets were overwritten.

        Raises ``OSError``.
        """
        size = size_of(self.path)
        end = size if max_bytes is None else min(size, self.offset + max_bytes)
        if end <= self.offset:
            return 0
        values = self._secrets()
        forms = _byte_forms(tuple(values))
        longest = max((len(os.fsencode(value)) for value in values), default=0)
        overlap, num_found = max(OVERLAP_BYTES, longest + 2 * MARGIN_BYTES), 0
        with open_to_change(self.path) as file:
            while self.offset < end:
                file.seek(self.offset)
                new = file.read(min(CHUNK_BYTES, end - self.offset))
                if not new:  # It became shorter under our hands.
                    break
                data, place = self._seen + new, self.offset - len(self._seen)
                keep = overlap
                for found in _secrets(data, forms):
                    first, last = found.span(1)
                    if place and found.start() < MARGIN_BYTES:
                        continue  # Seen before, and with what stands to the left of it.
                    if last > len(self._seen):
                        file.seek(place + first)
                        file.write(MASK.encode() * (last - first))
                        num_found += 1
                    if last == len(data):
                        keep = max(keep, len(data) - found.start() + MARGIN_BYTES)
                self.offset += len(new)
                self._seen = data[-min(keep, max(overlap, MAX_SECRET_BYTES)) :]
        return num_found

    def num_left(self) -> int:
        """Bytes that nobody has looked at yet."""
        return size_of(self.path) - self.offset

    def finish(self) -> Iterator[int]:
        """What is left, when nobody writes any more, in pieces. Raises ``OSError``."""
        while size_of(self.path) > self.offset + PIECE_BYTES:
            yield self.clean(PIECE_BYTES)
        yield self.clean()
