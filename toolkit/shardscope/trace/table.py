"""``Table``: a small result as a list of dicts that converts to a data frame."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Generic, TypeVar

from shardscope.core.html_table import format_value, render_html_table

if TYPE_CHECKING:
    import pandas as pd

Row = TypeVar("Row", bound=Mapping[str, object])

MAX_ROWS = 50
"""Rows that are printed or shown at the end of a cell; a trace may have thousands."""
MAX_CHARACTERS = 120
"""Characters of a cell that are printed or shown: kernels of templates have names of over a thousand."""


class Table(list[Row], Generic[Row]):
    """Rows as dicts, every row with the same keys.

    ``columns`` are in the data frame; rows may have further keys, such as where to look in the view.
    ``reason`` is shown if there are no rows, and ``text``, what they show, above them.
    """

    def __init__(
        self, rows: Iterable[Row] = (), columns: Sequence[str] = (), reason: str = "", text: str = ""
    ) -> None:
        super().__init__(rows)
        self.reason = reason
        self.text = text
        self.columns = tuple(columns) or tuple(self[0] if self else ())

    def __repr__(self) -> str:
        if not self:
            return "\n".join(filter(None, [self.text, self._describe_rest()]))
        cells = [[format_value(_shorten(row[key])) for key in self.columns] for row in self[:MAX_ROWS]]
        widths = [max(map(len, column)) for column in zip(self.columns, *cells, strict=True)]
        lines = [
            "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
            for line in (self.columns, *cells)
        ]
        return "\n".join(filter(None, [self.text, *lines, self._describe_rest()]))

    def _repr_html_(self) -> str:
        head = self.columns
        names = [key.replace("_", " ") for key in head]
        rows = [[_shorten(row[key]) for key in head] for row in self[:MAX_ROWS]]
        text = f"<p>{escape(self.text)}</p>" if self.text else ""
        return text + render_html_table(names, rows, self._describe_rest())

    def _describe_rest(self) -> str:
        if not self:
            return f"no rows: {self.reason}" if self.reason else "no rows"
        left_out = [f"{MAX_ROWS} of {len(self):,} rows"] if len(self) > MAX_ROWS else []
        if any(_shorten(row[key]) is not row[key] for row in self[:MAX_ROWS] for key in self.columns):
            left_out.append(f"{MAX_CHARACTERS} characters of each name")
        return f"{' and '.join(left_out)}; to_frame() has all" if left_out else ""

    def to_frame(self) -> pd.DataFrame:
        """Return the rows as a pandas data frame."""
        import pandas as pd  # slow to import, and most callers only read the rows

        return pd.DataFrame(list(self), columns=list(self.columns))


def _shorten(value: object) -> object:
    """Return a text without its end if it is long; other values as they are."""
    if not isinstance(value, str) or len(value) <= MAX_CHARACTERS:
        return value
    return f"{value[: MAX_CHARACTERS - 1].rstrip(' ,')}…"
