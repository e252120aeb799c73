"""HTML tables of parts: a row per part, a column per tier and pinned plan, expandable rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from shardscope_widgets.kit.pins import UNPIN, PinName

NOT_REPORTED = "–"


class Column(NamedTuple):
    """One column of numbers."""

    title: str
    hint: str = ""
    """Longer text, shown on hover."""
    unpin: int | None = None
    """Index of the pinned plan that the button in the heading unpins."""
    is_empty: bool = False
    """Whether the column has no numbers yet; a narrow page hides it."""

    @classmethod
    def for_pin(cls, index: int, name: PinName) -> tuple[Column, Column]:
        """Return the two columns of a pinned plan: its numbers, and the difference from the current plan."""
        hint = f"current plan minus pinned plan ({name.full})"
        return cls(name.short, f"pinned: {name.full}", unpin=index), cls("difference", hint)


class PartRow(NamedTuple):
    """One row; ``why`` is HTML that is shown when the row is expanded."""

    key: str
    name: str
    cells: Sequence[str | tuple[str, str]]
    """Text of each cell, or text and tooltip (why a number is missing, for hover and screen readers)."""
    why: str
    mark: str = ""
    """HTML of its colour swatch."""
    is_total: bool = False


def render_part_table(corner: str, columns: Sequence[Column], rows: Iterable[PartRow]) -> str:
    """Return the table as HTML; ``corner`` is the unit of its numbers."""
    head = "".join(_render_heading(column) for column in columns)
    body = "".join(_render_row(row, columns) for row in rows)
    return (
        "<div class='ss-scroll'><table class='ss-parts' data-roving><thead><tr>"
        f"<th scope='col'>{escape(corner)}</th>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _render_heading(column: Column) -> str:
    hint = f" title='{escape(column.hint, quote=True)}'" if column.hint else ""
    button = ""
    if column.unpin is not None:
        label = escape(f"{UNPIN} {column.title}", quote=True)
        button = (
            f"<button class='ss-unpin' data-act='unpin {column.unpin}' title='{label}' "
            f"aria-label='{label}'>×</button>"
        )
    # Keep the button on the line of the last word.
    first, _, last = column.title.rpartition(" ")
    label = f"{escape(first)} <span class='ss-together'>{escape(last)}{button}</span>"
    content = label.strip() if button else escape(column.title)
    return f"<th scope='col'{_empty_class(column)}{hint}>{content}</th>"


def _render_row(row: PartRow, columns: Sequence[Column]) -> str:
    pairs = zip(columns, row.cells, strict=True)
    cells = "".join(
        _render_cell(column, *((cell,) if isinstance(cell, str) else cell)) for column, cell in pairs
    )
    total = " ss-total" if row.is_total else ""
    key = escape(row.key, quote=True)
    # The button serves the keyboard and screen readers; a click anywhere in the row does the same.
    return (
        f"<tr class='ss-opens{total}' data-opens='{key}'><th scope='row'>"
        f"<button class='ss-name' aria-expanded='false'>{row.mark}{escape(row.name)}</button></th>"
        f"{cells}</tr>"
        f"<tr class='ss-why' data-why='{key}' hidden><td colspan='{len(columns) + 1}'>{row.why}</td></tr>"
    )


def _render_cell(column: Column, text: str, hint: str = "") -> str:
    if not hint:
        return f"<td{_empty_class(column)}>{escape(text)}</td>"
    spoken = f"<span class='ss-off-screen'> {escape(hint)}</span>"
    return f"<td{_empty_class(column)} title='{escape(hint, quote=True)}'>{escape(text)}{spoken}</td>"


def _empty_class(column: Column) -> str:
    return " class='ss-empty'" if column.is_empty else ""


def add_sign(difference: float, amount: str) -> str:
    """Return ``amount``, the size of a ``difference``, with a sign; ``0`` if it rounds to zero."""
    if not any(digit in amount for digit in "123456789"):
        return "0"
    return f"+{amount}" if difference > 0 else f"−{amount}"
