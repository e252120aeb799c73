"""What all pickers share: labelled rows, an error slot at each, and the last valid value kept."""

from __future__ import annotations

import re
from contextlib import suppress
from html import escape
from math import nan
from typing import Any

import ipywidgets as widgets
import traitlets

from shardscope.cluster import MAX_BYTES
from shardscope.validation import refuse
from shardscope_widgets.kit import controls

LABEL_WIDTH = "84px"
THOUSANDS = re.compile(r"[0-9]{1,3}(,[0-9]{3})+(\.[0-9]*)?")


class Row(widgets.HBox):
    """One labelled input (or a few side by side) and, under it, what is wrong with it."""

    def __init__(self, label: str, *inputs: widgets.Widget) -> None:
        self.name = controls.label(label, LABEL_WIDTH)
        self.message = ""
        """What is wrong; empty: nothing."""
        self._error: widgets.HTML | None = None
        super().__init__([self.name, *inputs])
        self.add_class("ss-row")

    def show_error(self, message: str) -> None:
        """Put ``message`` under the input; an empty one takes it away."""
        self.message = message
        if self._error is None:
            if not message:
                return
            # Not before: most rows never have one, and a page that is loaded anew has less to get.
            self._error = controls.html("", "ss-error")
            self.children = (*self.children, self._error)
        self._error.value = f"<span role='alert'>{escape(message)}</span>" if message else ""
        (self._error.remove_class if message else self._error.add_class)("ss-off")


class Picker(widgets.VBox):
    """Rows that make one noun. ``value`` changes only when all rows are valid together."""

    value = traitlets.Any(help="The noun, last valid one while an input is wrong.")
    is_wrong = traitlets.Bool(False, help="Whether a message stands at an input.")
    heading = ""

    def __init__(self, rows: dict[str, Row], hint: widgets.Widget | None = None) -> None:
        self.rows = rows
        self._own_error = False
        # A row may answer for several fields; it stands on the screen once.
        unique = list(dict.fromkeys(rows.values()))
        super().__init__([*unique, *([hint] if hint else [])], layout=controls.layout())
        self.add_class("ss-group")

    def make(self) -> Any:
        """The noun that the inputs describe. Raises ``ValueError``."""
        raise TypeError(f"{type(self).__name__} does not say what it makes")

    def read(self, change: object = None) -> None:
        """Take the inputs over, or show what is wrong with them and keep the last valid value."""
        try:
            value = self.make()
        except (ValueError, KeyError) as error:
            self._own_error = True
            self._show(error)
            return
        self._own_error = False
        self._clear()
        self.value = value

    def show_plan_error(self, error: Exception) -> None:
        """Put what is wrong with the whole plan at the input that it names."""
        self._show(error)

    def clear_plan_errors(self) -> None:
        """Take away what was wrong with the plan; what is wrong with an input stays until that is mended."""
        if not self._own_error:
            self._clear()

    def _show(self, error: Exception) -> None:
        # "Layout.tp x pp" names several fields: the first that has an input gets the message.
        fields = getattr(error, "field", "").rpartition(".")[2].split()
        rows = [self.rows[field] for field in fields if field in self.rows]
        row = rows[0] if rows else next(iter(self.rows.values()))
        self._clear()
        self.is_wrong = True
        row.show_error(str(error.args[0] if isinstance(error, KeyError) else error))

    def _clear(self) -> None:
        self.is_wrong = False
        for row in dict.fromkeys(self.rows.values()):
            row.show_error("")


class Nothing:
    """Stands for None among choices: to ipywidgets, a value of None means that nothing is chosen."""

    def __repr__(self) -> str:
        return "none"


NOTHING = Nothing()


def typed_number(text: str) -> Any:
    """What a person typed as a whole number if it is one ("4,096"), else the text, for the noun to refuse."""
    cleaned = text.strip().replace(",", "").replace("_", "").replace(" ", "")
    try:
        return int(cleaned)
    except ValueError:
        return text


def typed_size(field: str, text: str, unit: str, least: float, most: float) -> float:
    """A number of ``unit`` that a person typed, as "2,048". Raises ``ValueError`` beyond ``least`` to
    ``most``, and for a comma that separates no thousands: to some it is a point."""
    number = nan
    if "," not in text or THOUSANDS.fullmatch(text.strip()):
        with suppress(ValueError):
            number = float(text.replace(",", ""))
    if not least <= number <= most:
        refuse(field, text, f"a number of {unit} from {least:g} to {most:,.0f}", "1,024")
    return number


def typed_bytes(field: str, text: str) -> int:
    """What a person typed in GiB, in bytes. Raises ``ValueError``."""
    return round(typed_size(field, text, "GiB", 0, MAX_BYTES / 2**30) * 2**30)


def typed_rate(text: str) -> Any:
    """What a person typed as a number if it is one ("3e-4"), else the text, for the noun to refuse."""
    try:
        return float(text)
    except ValueError:
        return text
