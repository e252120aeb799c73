"""Masking of secrets (tokens, keys, passwords) in everything that a run writes.

Records are masked before they are written. The output of ranks goes to a file directly, without a process in
between that could lose or delay it; the supervisor masks secrets there in place, shortly afterwards.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import AnyStr

from shardscope.records.regular_files import (
    open_descriptor,
    open_new,
    open_to_change,
    open_to_read,
    size_of,
)
from shardscope.records.secret_forms import KNOWN_FORMS, is_path, is_secret_field, is_secret_name

MASK = "*"
MIN_LENGTH = 8
"""Shortest value that is masked; shorter ones are often ordinary words."""
NAME_LENGTH = 64
"""Longest text, such as a metric's name, for which the masked form is cached."""
CHUNK_BYTES = 2**20
OVERLAP_BYTES = 2**14
"""Least number of bytes before the current position that are scanned again: a secret may be printed in two
writes, and a private key is recognized by its last line only."""
MAX_SECRET_BYTES = 2**16
"""Most bytes kept for the next scan. The end of a longer secret that is printed in pieces stays visible."""
MARGIN_BYTES = 16
"""Upper bound of the context to the left that the patterns look at (lookbehind)."""
BEGIN_OF_KEY = re.compile(rb"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----(?=\s|\\[nr])")
"""The first line of a private key; an error message that mentions it goes on in the same line."""
SECTION = re.compile(r"\[[^]=\"]*]")
"""A section's header in an INI file."""
JSON_FIELD = re.compile(r'"([^"]+)"\s*:\s*"(.*)",?')
ASSIGNMENT = re.compile(r"(?:export\s+)?([^\s=\"']+)\s*=\s*([^=]+={0,2})")
"""A field of an INI file or a variable of a shell; not a line of base64, which only ends with "="."""
MAX_KEY_BYTES = 12_288
"""Longest private key, with its first line, that the patterns recognize."""
PIECE_BYTES = 2**23
"""Bytes per call of :meth:`LogCleaner.finish`; each takes a fraction of a second."""


def secret_values(environment: Mapping[str, str]) -> list[str]:
    """Return the values in ``environment`` whose variable names denote secrets, longest first.

    Those of several lines, such as a credential in JSON, are followed by the secrets in their lines: a log
    may have them indented, behind a prefix, or one by one.
    """
    # Filter by name before reading: os.environ decodes each value on access.
    values = {environment.get(name, "") for name in environment if is_secret_name(name)}
    values |= {secret for value in values for secret in _find_line_secrets(value)}
    secrets = {value for value in values if len(value) >= MIN_LENGTH and not is_path(value)}
    return sorted(secrets, key=len, reverse=True)


def _find_line_secrets(value: str) -> Iterator[str]:
    """Yield the secrets in the lines of a value of several lines: whole lines, or values of named fields.

    A line such as ``region = us-east-1`` is ordinary text, in a log too.
    """
    lines = [line.strip() for line in value.splitlines()]
    if len(lines) < 2:
        return
    for line in lines:
        if SECTION.fullmatch(line):
            continue
        if pair := JSON_FIELD.fullmatch(line):
            name, text = pair.groups()
            if not is_secret_field(name):
                yield line  # Of JSON, a whole line is hardly ordinary text, and other names hide secrets too.
                continue
            yield text
            with contextlib.suppress(ValueError):
                decoded = str(json.loads(f'"{text}"'))
                yield decoded
                yield from _find_line_secrets(decoded)  # Such as a private key.
        elif pair := ASSIGNMENT.fullmatch(line):
            name, text = pair.groups()
            if is_secret_field(name):
                yield text.strip("\"'")
        else:
            yield line


_learned: set[str] = set()
"""Secrets of other processes' environments and of earlier environments of this one; in memory only."""


def learn_secret(value: str) -> None:
    """Mask ``value`` from now on even if it is not in the environment, unless it is too short."""
    if len(value) >= MIN_LENGTH:
        _learned.add(value)


def known_secrets() -> list[str]:
    """Return the secrets in the current environment and the learned ones, longest first."""
    values = secret_values(os.environ)
    return sorted(_learned.union(values), key=len, reverse=True) if _learned else values


def redact(text: str) -> str:
    """Return ``text`` with each secret replaced by asterisks of the same length."""
    # Not cached: a notebook may set a token at any time.
    return text if len(text) < MIN_LENGTH else _mask(text, tuple(known_secrets()))


def create_redactor() -> Callable[[str], str]:
    """Return :func:`redact` for several texts: it reads the secrets once and caches short texts."""
    secrets: list[tuple[str, ...]] = []

    def clean(text: str) -> str:
        if len(text) < MIN_LENGTH:
            return text
        if not secrets:
            secrets.append(tuple(known_secrets()))
        return _mask_cached(text, secrets[0]) if len(text) <= NAME_LENGTH else _mask(text, secrets[0])

    return clean


def _mask(text: str, secrets: tuple[str, ...]) -> str:
    forms = _text_forms(secrets)
    pieces, done = [], 0
    for start, end in sorted(match.span(1) for match in _find_secrets(text, forms)):
        if end > done:
            start = max(start, done)
            pieces += [text[done:start], MASK * (end - start)]
            done = end
    return "".join([*pieces, text[done:]])


_mask_cached = functools.lru_cache(maxsize=1024)(_mask)


def _find_secrets(data: AnyStr, forms: Sequence[tuple[AnyStr, re.Pattern[AnyStr]]]) -> list[re.Match[AnyStr]]:
    """Return the matches of secrets in ``data``: each secret is group 1; matches may overlap."""
    return [match for literal, pattern in forms if literal in data for match in pattern.finditer(data)]


@functools.lru_cache(maxsize=8)
def _text_forms(values: tuple[str, ...]) -> tuple[tuple[str, re.Pattern[str]], ...]:
    # In JSON, as in a dump of the environment, quotes and line ends are escaped.
    printed = {form for value in values for form in (value, json.dumps(value)[1:-1])}
    known = {value: f"({re.escape(value)})" for value in printed} | KNOWN_FORMS
    return tuple((literal, re.compile(pattern)) for literal, pattern in known.items())


@functools.lru_cache(maxsize=8)
def _byte_forms(values: tuple[str, ...]) -> tuple[tuple[bytes, re.Pattern[bytes]], ...]:
    return tuple(
        (os.fsencode(literal), re.compile(os.fsencode(pattern.pattern)))
        for literal, pattern in _text_forms(values)
    )


class LogCleaner:
    """In-place masking of secrets in a file that other processes append to; offsets do not change.

    A secret at the end of the file is masked at once, but the rest of it may be written later. So the last
    bytes are kept in memory as they were written, and the rest is recognized and masked too.

    For a reader in another process that must not see secrets before they are masked, a small file beside the
    log has the number of bytes that it may read (:func:`read_masked_size`).
    """

    def __init__(self, path: Path, secrets: Callable[[], list[str]] = known_secrets, offset: int = 0) -> None:
        """Create a cleaner that begins at ``offset``.

        ``secrets`` is called after the size is read, so it covers all data up to it.
        """
        self.path = path
        self.offset = offset
        self._secrets = secrets
        self._seen = b""
        """The bytes before ``offset``, unmasked; in memory only."""
        self._recorded = 0
        """The number of bytes that readers may read, as it was last recorded."""

    def clean(self, max_bytes: int | None = None) -> int:
        """Mask secrets in new data, at most ``max_bytes`` of it. Return the number of masked secrets.

        Raises ``OSError``.
        """
        size = size_of(self.path)
        end = size if max_bytes is None else min(size, self.offset + max_bytes)
        if end <= self.offset:
            # Nothing has followed since the last call.
            self._record(self.offset - len(self._seen) + _find_open_key(self._seen))
            return 0
        # After the size: secrets that were learned until now cover all data up to ``end``.
        values = self._secrets()
        forms = _byte_forms(tuple(values))
        longest = max(len(literal) for literal, _ in forms)
        overlap, num_found = max(OVERLAP_BYTES, longest + 2 * MARGIN_BYTES), 0
        with open_to_change(self.path) as file:
            while self.offset < end:
                file.seek(self.offset)
                new = file.read(min(CHUNK_BYTES, end - self.offset))
                if not new:  # the file was truncated meanwhile
                    break
                # Scan the new bytes together with the last ones, for secrets that cross the boundary.
                data, start = self._seen + new, self.offset - len(self._seen)
                keep = overlap
                for match in _find_secrets(data, forms):
                    first, last = match.span(1)
                    if start and match.start() < MARGIN_BYTES:
                        continue  # handled by the last scan, which saw all context to its left
                    # What follows a secret may be what it is recognized by: the last line of a key.
                    if match.end() > len(self._seen):
                        file.seek(start + first)
                        file.write(MASK.encode() * (last - first))
                        num_found += 1
                    # A secret at the end may continue: keep it whole for the next scan.
                    if last == len(data):
                        keep = max(keep, len(data) - match.start() + MARGIN_BYTES)
                self.offset += len(new)
                self._seen = data[-min(keep, max(overlap, MAX_SECRET_BYTES)) :]
        self._record(self.offset - len(self._seen) + _find_end_of_lines(self._seen))
        return num_found

    def num_left(self) -> int:
        """Return the number of bytes not scanned yet."""
        return size_of(self.path) - self.offset

    def finish(self) -> Iterator[int]:
        """Mask the rest after the last write; yield the number masked in each piece. Raises ``OSError``."""
        while size_of(self.path) > self.offset + PIECE_BYTES:
            yield self.clean(PIECE_BYTES)
        num_found = self.clean()
        self._record(self.offset)
        yield num_found

    def _record(self, size: int) -> None:
        """Record how many bytes may be read, if there is a reader that needs to know it."""
        if size <= self._recorded:
            return
        with contextlib.suppress(OSError):
            descriptor = open_descriptor(_record_of(self.path), os.O_WRONLY)
            try:
                os.pwrite(descriptor, size.to_bytes(8, "little"), 0)
            finally:
                os.close(descriptor)
            self._recorded = size


def read_masked_size(log: Path) -> int:
    """Return how many bytes of a log may be read: those whose secrets are masked.

    An unfinished line at its end is included once nothing has followed it for a check: its rest may complete
    a secret. A private key is included once it is complete. The first call creates the file in which the
    log's cleaner records the number, so it returns 0.
    """
    record = _record_of(log)
    with contextlib.suppress(OSError):
        try:
            with open_to_read(record) as file:
                return int.from_bytes(file.read(8), "little")
        except FileNotFoundError:
            with open_new(record) as file:
                file.write(bytes(8))  # A disk that fills up later has room for the number.
    return 0


def _record_of(log: Path) -> Path:
    return log.with_name(f".{log.name}.masked")


def _find_end_of_lines(data: bytes) -> int:
    """Return the number of bytes that no later ones can make a secret: whole lines, and no part of a key."""
    end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
    return min(end, _find_open_key(data))


def _find_open_key(data: bytes) -> int:
    """Return where a private key begins whose last line is missing; the length of ``data`` without one."""
    begins = [match.start() for match in BEGIN_OF_KEY.finditer(data)]
    is_open = begins and b"-----END" not in data[begins[-1] :] and len(data) - begins[-1] < MAX_KEY_BYTES
    return begins[-1] if is_open else len(data)
