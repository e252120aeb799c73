"""The base of all pickers: labelled rows, errors with fixes at their input, the last valid value."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from html import escape
from math import isnan, nan
from types import MappingProxyType

import ipywidgets as widgets
import traitlets

from shardscope.core.cluster import MAX_BYTES
from shardscope.core.errors import FieldError, refuse
from shardscope.records.json_values import is_int
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.clickable import Clickable, IgnoredError

LABEL_WIDTH = "86px"
NO_CHANGES: Mapping[str, object] = MappingProxyType({})
THOUSANDS = re.compile(r"[0-9]{1,3}(,[0-9]{3})+(\.[0-9]*)?")


class Row(widgets.HBox):
    """One labelled input (or several in a row) with an error message and its fix below."""

    def __init__(self, label: str, *inputs: widgets.Widget) -> None:
        self.name = controls.create_label(label, LABEL_WIDTH)
        self.message = ""
        """The error message, or empty."""
        self._error: Clickable | None = None
        self._fix: Callable[[], None] | None = None
        # Hidden with a class, so that all rows share one layout: a reloaded page has less to load.
        super().__init__([self.name, *inputs], layout=controls.share_layout())
        self.add_class("ss-row")
        self.is_shown = True

    def show(self, is_shown: bool) -> None:
        """Show the row, or hide it."""
        self.is_shown = is_shown
        controls.show_if(self, is_shown)

    def show_error(
        self, message: str, *, short: str = "", fix: str = "", on_fix: Callable[[], None] | None = None
    ) -> None:
        """Show ``message`` under the input, as ``short`` if that is given; an empty message removes it.

        ``fix`` is the label of a button that calls ``on_fix``.
        """
        self.message = message
        self._fix = on_fix
        if self._error is None:
            if not message:
                return
            # Created on demand: most rows never have an error, and a reloaded page has less to load.
            self._error = Clickable(self._press_fix, "ss-error")
            self.children = (*self.children, self._error)
        button = f" <button type='button' class='ss-act' data-act='fix'>{escape(fix)}</button>" if fix else ""
        tooltip = escape(message, quote=True)
        self._error.value = (
            f"<span role='alert' title='{tooltip}'>{escape(short or message)}</span>{button}"
            if message
            else ""
        )

    def _press_fix(self, act: str) -> None:
        if act != "fix" or self._fix is None:
            raise IgnoredError(act)
        self._fix()


class Picker(widgets.VBox):
    """Rows that define one object. ``value`` changes only when all rows are valid together."""

    value = traitlets.Any(help="The object; the last valid one while an input is wrong.")
    is_wrong = traitlets.Bool(False, help="Whether an error message is shown at an input.")
    answer = traitlets.Unicode("", help="The value in a few words, for the line of a folded question.")

    def __init__(self, rows: dict[str, Row], hint: widgets.Widget | None = None) -> None:
        self.rows = rows
        self.on_fix: Callable[[Mapping[str, object]], None] = self._set_own_fields
        """Called with the changes of a fix, by object and field; by default only own fields are set."""
        self.complete: Callable[[Mapping[str, object]], dict[str, object]] = dict
        """Extends a fix with the changes that the rest of the plan then needs; by default with none."""
        self._own_error = False
        self._wrong_boxes: list[widgets.DOMWidget] = []
        """The inputs that are marked as invalid."""
        self._tooltips: dict[str, str] = {}
        """Field -> its input's own tooltip."""
        # A row may serve several fields; it is shown once.
        unique = list(dict.fromkeys(rows.values()))
        super().__init__([*unique, *([hint] if hint else [])], layout=controls.share_layout())
        self.add_class("ss-group")

    def build_value(self) -> object:
        """Return the object given by the inputs. Raises ``ValueError``."""
        raise TypeError(f"{type(self).__name__} must define make()")

    @property
    def boxes(self) -> Mapping[str, widgets.ValueWidget]:
        """The input of each field."""
        return {}

    def show_reasons(self, reasons: Mapping[str, str]) -> None:
        """Show a recommendation on hover of each field's input, below what the input is."""
        for field, box in self.boxes.items():
            if not isinstance(box, widgets.DOMWidget):
                continue
            tooltip = self._tooltips.setdefault(field, box.tooltip or "")
            text = "\n".join(filter(None, [tooltip, reasons.get(field, "")]))
            if text != (box.tooltip or ""):
                box.tooltip = text

    def set_fields(self, values: Mapping[str, object]) -> None:
        """Set inputs by field, ignoring fields without an input. The last one set triggers the reading."""
        for field, value in values.items():
            box = self.boxes.get(field)
            # ipywidgets' Text accepts only str, and its selections treat None as "nothing selected".
            if isinstance(box, widgets.Text):
                box.value = "" if value is None else str(value)
            elif box is not None:
                box.value = NOTHING if value is None else value

    def read(self, change: object = None) -> None:
        """Read the inputs, or show their errors and keep the last valid value."""
        try:
            value = self.build_value()
        # KeyError: an unknown name of the catalogue.
        except (ValueError, KeyError) as error:
            # Kept when the plan's errors are cleared: another picker cannot correct this input.
            self._own_error = True
            self._show_error_at_input(error)
            return
        is_corrected, self._own_error = self._own_error, False
        self._clear_errors()
        before, self.value = self.value, value
        if is_corrected and before == value:
            # While an input is wrong, errors of the plan are removed: observers check the plan again.
            self.notify_change(
                traitlets.Bunch(name="value", old=before, new=value, owner=self, type="change")
            )

    def show_plan_error(self, error: Exception) -> None:
        """Show an error of the whole plan at the input that it names."""
        self._show_error_at_input(error)

    def clear_plan_errors(self) -> None:
        """Remove errors of the plan; an error of an input stays until the input changes."""
        if not self._own_error:
            self._clear_errors()

    def _set_own_fields(self, changes: Mapping[str, object]) -> None:
        self.set_fields({field.rpartition(".")[2]: value for field, value in changes.items()})

    def _show_error_at_input(self, error: Exception) -> None:
        # "Layout.tp x pp" names several fields: the first one with an input shows the message.
        fields = getattr(error, "field", "").rpartition(".")[2].split()
        rows = [self.rows[field] for field in fields if field in self.rows]
        # Without a named field the first row shows it, so that no error is lost.
        row = rows[0] if rows else next(iter(self.rows.values()))
        self._clear_errors()
        # A row may have inputs of several fields.
        boxes = [self.boxes.get(field) for field in fields if self.rows.get(field) is row]
        for box in boxes:
            if isinstance(box, widgets.DOMWidget):
                box.add_class("ss-wrong")
                self._wrong_boxes.append(box)
        self.is_wrong = True
        # str() of a KeyError is the repr of its message, in quotes.
        message = str(error.args[0] if isinstance(error, KeyError) else error)
        if not isinstance(error, FieldError):
            row.show_error(message)
            return
        changes = self.changes_of(error)
        # A fix may make another field invalid: one press applies all changes that the plan then needs.
        if changes:
            changes = self.complete(changes)
        if not changes:
            row.show_error(message, short=_shorten(error) if rows else "")
            return
        row.show_error(
            message,
            short=f"{error.problem or f'Allowed: {error.allowed}'}.",
            fix=self._label_fix(changes, fields),
            on_fix=lambda: self.on_fix(changes),
        )

    def _label_fix(self, changes: Mapping[str, object], wrong_fields: Sequence[str]) -> str:
        """Return ``Use 66``, or for several changes, or another field, what :func:`label_changes` returns."""
        (name, value), *others = changes.items()
        field = name.rpartition(".")[2]
        if others or field not in wrong_fields:
            return label_changes(changes)
        box = self.boxes.get(field)
        if value is None and isinstance(box, widgets.Text):
            return "Leave it empty"
        if value is None and isinstance(box, widgets.Dropdown):
            label = next((label for label, option in box.options if option is NOTHING), "none")
            return f'Choose "{label}"'
        return f"Use {format_fix_value(value)}"

    def changes_of(self, error: FieldError) -> dict[str, object]:
        """Return the fix of ``error`` as changes of inputs; empty if there is none."""
        changes = error.changes
        # A button for a change that has no input would leave the error in place.
        can_be_set = all(
            name == "Layout"
            or name.partition(".")[0] in ("Layout", "Recipe", "Cluster")
            or name.rpartition(".")[2] in self.boxes
            for name in changes
        )
        return changes if can_be_set else {}

    def _clear_errors(self) -> None:
        self.is_wrong = False
        for row in dict.fromkeys(self.rows.values()):
            row.show_error("")
        while self._wrong_boxes:
            self._wrong_boxes.pop().remove_class("ss-wrong")


def _shorten(error: FieldError) -> str:
    """Return the message at the input itself, which needs no field of the Python API."""
    return f"{error.problem or f'Allowed: {error.allowed}'}. Fix: {error.fix}."


def format_fix_value(value: object) -> str:
    """Return a value as it is typed into an input, such as ``1,024`` or ``q_proj, v_proj``."""
    if is_int(value):
        return f"{value:,}"
    if isinstance(value, float) and value.is_integer():
        return f"{value:,.0f}"
    if isinstance(value, tuple | list):
        return ", ".join(format_fix_value(each) for each in value)
    return str(getattr(value, "description", value))


UNITS = {"num_nodes": "nodes", "gpus_per_node": "GPUs per node"}


def label_changes(changes: Mapping[str, object]) -> str:
    """Return the label of a button that applies them, such as ``Use 2 nodes, global batch size 8``."""
    parts = []
    for name, value in changes.items():
        field, shown = name.rpartition(".")[2], format_fix_value(value)
        if field in UNITS:
            shown = f"{shown} {UNITS[field]}"
        elif name != "Layout":  # a layout is named by its framework
            shown = f"{field.replace('_', ' ')} {shown}"
        parts.append(shown)
    return f"Use {', '.join(parts)}"


class Nothing:
    """The choice that represents None: in ipywidgets, a value of None means no selection."""

    def __repr__(self) -> str:
        return "none"


NOTHING = Nothing()


def parse_number(text: str) -> int | str:
    """Parse a whole number ("4,096"); return any other text unchanged, for the object to reject."""
    cleaned = text.strip().replace(",", "").replace("_", "").replace(" ", "")
    try:
        return int(cleaned)
    except ValueError:
        return text


def parse_size(field: str, text: str, unit: str, least: float, most: float, example: float) -> float:
    """Parse a number of ``unit`` that the user typed, such as "2,048". Raises ``ValueError`` outside of
    ``least`` to ``most``, and for a comma that is no thousands separator: it may mean a decimal point.

    ``example`` is the fix for what is no number.
    """
    number = nan
    # "1,5" may mean 1.5 or 15: neither is guessed.
    if "," not in text or THOUSANDS.fullmatch(text.strip()):
        with suppress(ValueError):
            number = float(text.replace(",", ""))
    if not least <= number <= most:
        nearest = example if isnan(number) else min(max(number, least), most)
        refuse(field, text, f"a number of {unit} from {least:g} to {most:,.0f}", f"{nearest:,.10g}")
    return number


def parse_bytes(field: str, text: str) -> int:
    """Convert GiB that the user typed to bytes. Raises ``ValueError``."""
    number = parse_size(field, text, "GiB", 0, MAX_BYTES / 2**30, 1024)
    if 0 < number < 0.001:  # The cluster would take so few bytes for GiB.
        refuse(field, text, "0 or a number of GiB from 0.001", "0.001")
    return round(number * 2**30)


def parse_rate(text: str) -> float | str:
    """Parse a number ("3e-4"); return any other text unchanged, for the object to reject."""
    try:
        return float(text)
    except ValueError:
        return text
