"""Small HTML tables for notebooks: escaped text, no scripts, no style sheet."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

LEFT = " style='text-align:left;vertical-align:top;padding:2px 14px 2px 0'"
LEFT_ONE_LINE = " style='text-align:left;vertical-align:top;padding:2px 14px 2px 0;white-space:nowrap'"
RIGHT = " style='text-align:right;vertical-align:top;padding:2px 14px 2px 0;white-space:nowrap'"
# Notebooks use a fixed table layout, whose equal column widths break long names.
TABLE = "<table style='table-layout:auto;border-collapse:collapse'>"
SCROLL_BOX = "<div style='overflow-x:auto' tabindex='0'>"
"""Scrolls a wide table, with the arrow keys as well."""
WIDE_COLUMNS = 7
"""Least number of columns of a wide table."""
# A container has no width of its own: in a box that is as wide as its content, this is its width.
WIDE_BOX = SCROLL_BOX.replace("auto'", "auto;container-type:inline-size;contain-intrinsic-inline-size:900px'")
WIDE_TABLE = TABLE.replace("collapse'", "collapse;font-size:clamp(8.5px,1.6cqw,13px)'")
"""A table of many columns is smaller where its box is narrow: on paper nothing scrolls."""
LONG_NAME = 30
"""Most characters of a name that stays on one line."""
NO_VALUE = "–"


def render_html_table(head: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> str:
    """Return a table with one line per row. Numbers are right-aligned; every cell is escaped."""
    # ``rows`` may be a generator, and is read twice.
    shown = [list(row) for row in rows]
    # The head of a column is right-aligned if all of its cells are.
    is_number = [
        bool(shown) and all(isinstance(row[i], int | float | None) for row in shown) for i in range(len(head))
    ]
    aligned = [RIGHT if right else LEFT for right in is_number]
    # Only numbers and short names of rows stay on one line: on paper, a table does not scroll.
    titles = "".join(
        f"<th{style.replace(';white-space:nowrap', '')}>{escape(name)}</th>"
        for name, style in zip(head, aligned, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{_choose_style(value, style, is_first=i == 0)}>{render_text(format_value(value))}</td>"
            for i, (value, style) in enumerate(zip(row, aligned, strict=True))
        )
        + "</tr>"
        for row in shown
    )
    is_wide = len(head) >= WIDE_COLUMNS
    box, table = (WIDE_BOX, WIDE_TABLE) if is_wide else (SCROLL_BOX, TABLE)
    if is_wide:
        body, titles = (text.replace("2px 14px 2px 0", "2px 1em 2px 0") for text in (body, titles))
    return (
        f"{box}{table}{_render_caption(caption)}"
        f"<thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _choose_style(value: object, column_style: str, *, is_first: bool) -> str:
    """Return the style of a cell. A short name in the first column does not break at its hyphens."""
    if isinstance(value, int | float):
        return RIGHT
    if is_first and isinstance(value, str) and len(value) <= LONG_NAME and " " not in value:
        return LEFT_ONE_LINE
    return column_style


def render_html_fields(pairs: Mapping[str, object], caption: str = "") -> str:
    """Return a table with one line per name and value."""
    body = "".join(
        f"<tr><th scope='row'{LEFT}>{escape(name)}</th><td{LEFT}>{escape(format_value(value))}</td></tr>"
        for name, value in pairs.items()
    )
    return f"{TABLE}{_render_caption(caption)}<tbody>{body}</tbody></table>"


def render_html_dataclass(value: DataclassInstance) -> str:
    """Return the fields of a dataclass that are set, as a table: ``hidden_size`` as "hidden size"."""
    pairs: dict[str, object] = {}
    for field in dataclasses.fields(value):
        content = getattr(value, field.name)
        if content is None or not field.repr:
            continue
        name, unit = field.name, ""
        if name.endswith("_bytes") and isinstance(content, int):
            name, unit = name.removesuffix("_bytes"), "GiB"
            content = content / 2**30
        elif name.endswith("_bytes_per_second") and isinstance(content, int | float):
            name, unit = name.removesuffix("_bytes_per_second"), "GB/s"
            content = content / 1e9
        elif name.endswith("_flops") and isinstance(content, Mapping):
            name, unit = name.removesuffix("_flops"), "TFLOP/s"
            content = {key: flops / 1e12 for key, flops in content.items()}
        pairs[name.replace("_", " ").strip()] = f"{format_value(content)} {unit}".strip()
    return render_html_fields(pairs, type(value).__name__)


def format_value(value: object) -> str:
    """Return a value as text: ``4,096``, ``0.404``, "yes"; a nested object as its name."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return NO_VALUE
    # bool before int, of which it is a subclass.
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, tuple | list):
        return ", ".join(format_value(item) for item in value) or "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {format_value(item)}" for key, item in value.items()) or "none"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if type(value).__str__ is not object.__str__:
            return str(value)
        if isinstance(getattr(value, "name", None), str):
            return str(value.name)  # type: ignore[attr-defined]
        parts = ((f.name.replace("_", " "), getattr(value, f.name)) for f in dataclasses.fields(value))
        # `in` would compare with an array element by element.
        named = ((name, part) for name, part in parts if part is not None and not _is_empty(part))
        return ", ".join(f"{name} {format_value(part)}" for name, part in named)
    return str(value)


def _is_empty(value: object) -> bool:
    return isinstance(value, tuple) and not value


def render_text(text: str) -> str:
    """Escape a cell's text. A long name may break after an underscore or colons."""
    escaped = escape(text)
    return re.sub(r"(_|::)(?=\w)", r"\1<wbr/>", escaped) if len(text) > LONG_NAME else escaped


def _render_caption(text: str) -> str:
    return f"<caption style='text-align:left'>{escape(text)}</caption>" if text else ""
