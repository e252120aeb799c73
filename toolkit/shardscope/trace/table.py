"""``Table``: a small result as a list of dicts that converts to a data frame."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from shardscope.core.html_table import format_value, render_html_table

if TYPE_CHECKING:
    import pandas as pd

Row = TypeVar("Row", bound=Mapping[str, object])

MAX_ROWS = 50
"""Rows that are printed or shown at the end of a cell; a trace may have thousands."""


class Table(list[Row], Generic[Row]):
    """Rows as dicts, every row with the same keys.

    ``columns`` are in the data frame; rows may have further keys, such as where to look in the view.
    ``reason`` is shown if there are no rows.
    """

    def __init__(self, rows: Iterable[Row] = (), columns: Sequence[str] = (), reason: str = "") -> None:
        super().__init__(rows)
        self.reason = reason
        self.columns = tuple(columns) or tuple(self[0] if self else ())

    def __repr__(self) -> str:
        if not self:
            return self._describe_rest()
        cells = [[format_value(row[key]) for key in self.columns] for row in self[:MAX_ROWS]]
        widths = [max(map(len, column)) for column in zip(self.columns, *cells, strict=True)]
        lines = [
            "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
            for line in (self.columns, *cells)
        ]
        return "\n".join([*lines, *filter(None, [self._describe_rest()])])

    def _repr_html_(self) -> str:
        head = self.columns
        names = [key.replace("_", " ") for key in head]
        rows = [[row[key] for key in head] for row in self[:MAX_ROWS]]
        return render_html_table(names, rows, self._describe_rest())

    def _describe_rest(self) -> str:
        if not self:
            return f"no rows: {self.reason}" if self.reason else "no rows"
        more = len(self) - MAX_ROWS
        return f"{MAX_ROWS} of {len(self):,} rows; to_frame() has all" if more > 0 else ""

    def to_frame(self) -> pd.DataFrame:
        """Return the rows as a pandas data frame."""
        import pandas as pd  # slow to import, and most callers only read the rows

        return pd.DataFrame(list(self), columns=list(self.columns))
