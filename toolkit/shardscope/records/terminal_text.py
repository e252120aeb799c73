"""Text that was printed for a terminal: the control sequences in it, and the text without them."""

from __future__ import annotations

import re

CONTROLS = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f](?:"  # C0, DEL, C1, and what belongs to it:
    r"(?:(?<=\x1b)\[|(?<=\x9b))[0-?]*[ -/]*[@-~]?"  # CSI: colours, movements of the cursor
    r"|(?:(?<=\x1b)[\]PX^_]|(?<=[\x9d\x90\x98\x9e\x9f]))"  # OSC, DCS, SOS, PM, APC: titles, links, pictures
    r"[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"
    r"|(?<=\x1b)[ -/]*[0-~]?"  # all others, RIS (ESC c) among them
    r")?"
)
"""Control sequences of ECMA-48, complete or not, in their forms of seven and of eight bits, and single
controls, but for tab, newline and carriage return. Every escape and every C1 control is part of a match: what
is left when matches are cut out cannot be a sequence again. A string that nobody ends ends with its line. The
pattern begins with one set of characters, for which re searches fast."""


def plain_text(text: str) -> str:
    """Return ``text`` without anything that a terminal would obey."""
    return CONTROLS.sub("", text)


def as_shown(line: str) -> str:
    """As a terminal leaves it: what came after the last carriage return, as progress bars have it."""
    return line.rstrip("\r").rpartition("\r")[2]
