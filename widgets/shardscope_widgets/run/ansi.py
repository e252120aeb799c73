"""Terminal output as HTML: text is escaped, colours become classes, other escape sequences are removed.

No package is used: ansi2html and rich write fixed colours that are unreadable in the light or the dark
theme, and nbconvert's filter depends on most of Jupyter.
"""

from __future__ import annotations

import re
from html import escape

from shardscope.records.terminal_text import CONTROLS, render_line

COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
GREY = "grey"
"""Bright black; other bright colours map to the plain ones, which are chosen for each theme."""
FLAGS = {1: "bold", 2: "dim", 3: "italic", 4: "underline", 7: "inverse", 9: "strike"}
ENDED_FLAGS = {22: ("bold", "dim"), 23: ("italic",), 24: ("underline",), 27: ("inverse",), 29: ("strike",)}
SGR = re.compile(r"(?:\x1b\[|\x9b)([0-9;:]*)m")
"""Select Graphic Rendition (ECMA-48 8.3.117), the only escape sequence that is interpreted."""
MAX_CODES = 32
"""Maximum codes in one escape sequence; a longer one is ignored."""


def to_html(text: str) -> str:
    """Return ``text`` as HTML whose only attributes are classes ``ss-t-...`` of a fixed set."""
    style = _Style()
    parts: list[str] = []
    for line in text.split("\n"):
        shown = render_line(line)
        end = 0
        for sequence in CONTROLS.finditer(shown):
            parts.append(style.render(shown[end : sequence.start()]))
            end = sequence.end()
            if colour := SGR.fullmatch(sequence[0]):
                style.apply(colour[1])
        parts.append(style.render(shown[end:]))
        parts.append("\n")
    return "".join(parts[:-1])


class _Style:
    """The current text style."""

    def __init__(self) -> None:
        self.flags: set[str] = set()
        self.ink: str | None = None
        self.ground: str | None = None

    def render(self, text: str) -> str:
        """Return ``text`` in the current style."""
        clean = escape(text)
        classes = [f"ss-t-{name}" for name in sorted(self.flags)]
        classes += [f"ss-t-{self.ink}"] if self.ink else []
        classes += [f"ss-tb-{self.ground}"] if self.ground else []
        return f"<span class='{' '.join(classes)}'>{clean}</span>" if clean and classes else clean

    def apply(self, parameters: str) -> None:
        """Apply one escape sequence; ignore unknown codes."""
        # Ranks may print numbers of any length: three digits are enough for every known code.
        codes = [int(code[:3] or 0) for code in re.split("[;:]", parameters)[:MAX_CODES]]
        while codes:
            code = codes.pop(0)
            if code == 0:
                self.flags, self.ink, self.ground = set(), None, None
            elif code in FLAGS:
                self.flags.add(FLAGS[code])
            elif code in ENDED_FLAGS:
                self.flags.difference_update(ENDED_FLAGS[code])
            elif code in (38, 48):
                colour = _find_extended_colour(codes)
                self.ink, self.ground = (colour, self.ground) if code == 38 else (self.ink, colour)
            elif code == 39 or 30 <= code <= 37 or 90 <= code <= 97:
                self.ink = _find_named_colour(code, 30, 90)
            elif code == 49 or 40 <= code <= 47 or 100 <= code <= 107:
                self.ground = _find_named_colour(code, 40, 100)


def _find_named_colour(code: int, plain: int, bright: int) -> str | None:
    if code == plain + 9:
        return None
    return GREY if code == bright else COLOURS[(code - plain) % 10 if code < bright else code - bright]


def _find_extended_colour(codes: list[int]) -> str | None:
    """Return the colour nearest to the codes after 38 or 48: ``5;n`` of 256, or ``2;red;green;blue``."""
    kind = codes.pop(0) if codes else 0
    if kind == 2 and len(codes) >= 3:
        return _find_nearest_colour(*(codes.pop(0) for _ in range(3)))
    if kind != 5 or not codes:
        return None
    number = codes.pop(0)
    # The 256 colours of xterm: 16 named ones, a 6 x 6 x 6 cube, 24 greys.
    if number < 16:
        return GREY if number == 8 else COLOURS[number % 8]
    if number < 232:  # a 6 x 6 x 6 colour cube
        cube = number - 16
        return _find_nearest_colour(*(51 * shade for shade in (cube // 36, cube // 6 % 6, cube % 6)))
    return _find_nearest_colour(*(8 + 10 * (number - 232),) * 3)


def _find_nearest_colour(red: int, green: int, blue: int) -> str:
    most, least = max(red, green, blue), min(red, green, blue)
    # Nearly equal channels are a grey, whatever their exact order.
    if most - least < 40:
        return "black" if most < 64 else GREY if most < 176 else "white"
    # The ANSI colours count in binary, red 1, green 2, blue 4: a channel is on above the middle.
    middle = (most + least) / 2
    return COLOURS[(red > middle) + 2 * (green > middle) + 4 * (blue > middle)]
