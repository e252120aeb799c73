"""``Table``: a small result as a list of dicts that converts to a data frame."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from shardscope.core.html_table import render_html_table

if TYPE_CHECKING:
    import pandas as pd

Row = TypeVar("Row", bound=Mapping[str, object])


class Table(list[Row], Generic[Row]):
    """Rows as dicts, every row with the same keys.

    ``columns`` are in the data frame; rows may have further keys, such as where to look in the view.
    """

    def __init__(self, rows: Iterable[Row] = (), columns: Sequence[str] = ()) -> None:
        super().__init__(rows)
        self.columns = tuple(columns) or tuple(self[0] if self else ())

    def _repr_html_(self) -> str:
        head = self.columns
        names = [key.replace("_", " ") for key in head]
        return render_html_table(names, [[row[key] for key in head] for row in self])

    def to_frame(self) -> pd.DataFrame:
        """Return the rows as a pandas data frame."""
        import pandas as pd  # slow to import, and most callers only read the rows

        return pd.DataFrame(list(self), columns=list(self.columns))
