"""What a learner reads: feedback on an answer, and which cell to run where one is missing."""

from __future__ import annotations

import re
import sys
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


class MissingCellError(NameError):
    """A cell uses a variable that no cell of this kernel has made yet. Notebooks show the message alone."""

    def _render_traceback_(self) -> list[str]:
        # IPython shows these lines in place of a traceback.
        return [str(self)]


def needs(**cells: str) -> None:
    """Raise an error that names the cell to run if a variable is missing: ``needs(plan="Cell 2")``.

    Keywords are variables of the calling cell; values are the first words of the cell that makes each.
    After a restart, or where cells were run out of order, the learner reads which cell to run, without a
    traceback.
    """
    frame = sys._getframe(1)
    missing: dict[str, list[str]] = {}
    for name, cell in cells.items():
        if name not in frame.f_locals and name not in frame.f_globals:
            missing.setdefault(cell, []).append(name)
    if missing:
        steps = "; ".join(
            f'run the cell that begins with "# {cell}", which makes {", ".join(names)}'
            for cell, names in missing.items()
        )
        raise MissingCellError(
            f"Not in this kernel yet: {steps}; then run this cell again. "
            "(After a restart every cell has to run again: Run > Run All Above Selected Cell.)"
        )
