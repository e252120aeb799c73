"""Incremental, case-insensitive text search in a growing log of any size."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

from shardscope.records.redaction import redact
from shardscope.records.regular_files import is_hole, open_to_read, skip_hole
from shardscope.records.terminal_text import as_shown, plain_text

MAX_MATCHES = 200
"""Number of last matching lines that are stored; all are counted."""
MAX_LINE = 2000
"""Characters that are stored of a line."""
PIECE_BYTES = 2**22


class LogSearch:
    """One case-insensitive search for the text ``words`` in the file at ``path``."""

    def __init__(self, path: Path, words: str) -> None:
        self.path = path
        self.words = words
        self._wanted = words.casefold()
        self._begin()

    def _begin(self) -> None:
        self.matches: deque[tuple[int, str]] = deque(maxlen=MAX_MATCHES)
        """(line number from 1, line without control sequences), in the file's order."""
        self.num_matches = 0
        self.num_lines = 0
        self._offset = 0
        self._rest = b""

    def look(self, max_bytes: int = 2 * PIECE_BYTES) -> bool:
        """Search the next ``max_bytes``. Return whether there is more to read.

        A missing file has no lines. A last line without newline is left for the next call.
        """
        try:
            with open_to_read(self.path) as file:
                size = os.fstat(file.fileno()).st_size
                if size < self._offset:  # truncated or replaced
                    self._begin()
                end = self._offset + max_bytes
                file.seek(self._offset)
                while self._offset < end and (data := file.read(min(PIECE_BYTES, end - self._offset))):
                    self._offset += len(data)
                    if is_hole(data):
                        self._offset = skip_hole(file, self._offset)
                        break
                    self._take(data)
        except OSError:
            return False
        return self._offset < size

    def _take(self, data: bytes) -> None:
        whole, newline, rest = (self._rest + data).rpartition(b"\n")
        if not newline and len(rest) < PIECE_BYTES:
            self._rest = rest
            return
        # Megabytes without a newline are split into lines of that size, to bound the memory.
        whole, self._rest = (whole, rest) if newline else (rest, b"")
        text = whole.decode(errors="replace")
        lines = plain_text(text).split("\n")
        # One casefold() of the whole text: one per line would take a minute for the log of a long run.
        for place, folded in enumerate("\n".join(lines).casefold().split("\n")):
            if self._wanted in folded and self._wanted in (plain := as_shown(lines[place])).casefold():
                self.num_matches += 1
                shown = _around(redact(plain), self._wanted)
                self.matches.append((self.num_lines + place + 1, shown))
        self.num_lines += len(lines)


def _around(line: str, wanted: str) -> str:
    """Return ``line``; for a long one, the part around the first match."""
    if len(line) <= MAX_LINE:
        return line
    start = max(0, line.casefold().find(wanted) - MAX_LINE // 2)
    return f"… {line[start : start + MAX_LINE]} …"
