"""Terminal output: its control sequences, and the plain text without them."""

from __future__ import annotations

import re

CONTROLS = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f](?:"  # C0, DEL, C1, and the rest of the sequence:
    r"(?:(?<=\x1b)\[|(?<=\x9b))[0-?]*[ -/]*[@-~]?"  # CSI: colors, cursor movements
    r"|(?:(?<=\x1b)[\]PX^_]|(?<=[\x9d\x90\x98\x9e\x9f]))"  # OSC, DCS, SOS, PM, APC: titles, links, pictures
    r"[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"
    r"|(?<=\x1b)[ -/]*[0-~]?"  # all others, RIS (ESC c) among them
    r")?"
)
"""Control sequences of ECMA-48, complete or not, in 7-bit and 8-bit form, and single control characters
except tab, newline and carriage return. Every ESC and C1 character is part of a match, so the text without
matches cannot contain a sequence again. An unterminated string ends with its line. The pattern starts with a
single character class, which re searches fast."""


def plain_text(text: str) -> str:
    """Return ``text`` without control sequences."""
    return CONTROLS.sub("", text)


def render_line(line: str) -> str:
    """Return ``line`` as a terminal shows it: the text after the last carriage return (progress bars)."""
    return line.rstrip("\r").rpartition("\r")[2]
