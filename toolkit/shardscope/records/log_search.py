"""Incremental, case-insensitive text search in a growing log of any size."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

from shardscope.records.redaction import redact
from shardscope.records.regular_files import is_hole, open_to_read, skip_hole
from shardscope.records.terminal_text import plain_text, render_line

MAX_MATCHES = 200
"""Number of last matching lines that are stored; all are counted."""
MAX_LINE = 2000
"""Characters that are stored of a line."""
PIECE_BYTES = 2**22
MAX_BYTES = 2 * PIECE_BYTES
"""Bytes that one call searches."""


class LogSearch:
    """One case-insensitive search for ``text`` in the file at ``path``."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self.text = text
        self._folded_text = text.casefold()
        self._reset()

    def _reset(self) -> None:
        self.matches: deque[tuple[int, str]] = deque(maxlen=MAX_MATCHES)
        """(line number from 1, line without control sequences), in the file's order."""
        self.num_matches = 0
        self.num_lines = 0
        self._offset = 0
        self._rest = b""

    def search_next(self) -> bool:
        """Search the next :data:`MAX_BYTES`. Return whether there is more to read.

        A missing file has no lines. A last line without newline is left for the next call.
        """
        try:
            with open_to_read(self.path) as file:
                size = os.fstat(file.fileno()).st_size
                if size < self._offset:  # truncated or replaced
                    self._reset()
                end = self._offset + MAX_BYTES
                file.seek(self._offset)
                while self._offset < end and (data := file.read(min(PIECE_BYTES, end - self._offset))):
                    self._offset += len(data)
                    if is_hole(data):
                        self._offset = skip_hole(file, self._offset)
                        break
                    self._search_data(data)
        except OSError:
            return False
        return self._offset < size

    def _search_data(self, data: bytes) -> None:
        complete, newline, rest = (self._rest + data).rpartition(b"\n")
        if not newline and len(rest) < PIECE_BYTES:
            self._rest = rest
            return
        # Megabytes without a newline are split into lines of that size, to bound the memory.
        complete, self._rest = (complete, rest) if newline else (rest, b"")
        lines = plain_text(complete.decode(errors="replace")).split("\n")
        # One casefold() of the whole text: one per line would take a minute for the log of a long run.
        for index, folded in enumerate("\n".join(lines).casefold().split("\n")):
            if self._folded_text not in folded:
                continue
            # The text may be in a part of the line that a progress bar has overwritten.
            line = render_line(lines[index])
            if self._folded_text in line.casefold():
                self.num_matches += 1
                excerpt = _crop_around(redact(line), self._folded_text)
                self.matches.append((self.num_lines + index + 1, excerpt))
        self.num_lines += len(lines)


def _crop_around(line: str, folded_text: str) -> str:
    """Return ``line``; for a long one, the part around the first match."""
    if len(line) <= MAX_LINE:
        return line
    start = max(0, line.casefold().find(folded_text) - MAX_LINE // 2)
    return f"… {line[start : start + MAX_LINE]} …"
