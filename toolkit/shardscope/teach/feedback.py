"""``Feedback``: what a learner reads about an answer, displayed at the end of a notebook cell."""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape

COLORS = {True: "#1a7f37", False: "#bc4c00", None: "#6e7781"}
"""Borders that stand out on light and dark pages; the text has the page's own color."""


@dataclass(frozen=True, kw_only=True)
class Feedback:
    """Feedback on one answer, displayed at the end of a notebook cell. It is true if the answer is right."""

    exercise: str
    correct: bool | None
    """None: nothing was judged, because there is no answer yet or no such exercise."""
    text: str
    """All of the feedback."""
    num_wrong: int = 0
    """Different wrong answers so far; each reveals a hint that says more."""

    def __bool__(self) -> bool:
        return self.correct is True

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        text = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(self.text, quote=False))
        # "Right." and "Not yet." in bold.
        text = re.sub(r"^(Right|Not yet)\.", r"<b>\1.</b>", text).replace("\n", "<br>")
        return (
            f"<div role='status' style='border-left:4px solid {COLORS[self.correct]};padding:4px 12px;"
            f"margin:4px 0;max-width:46em;line-height:1.5'>{text}</div>"
        )
