"""Menus that assign columns of a data source whose names are not known."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import ipywidgets as widgets
import traitlets

from shardscope.training.examples.column_names import OPTIONAL_ROLES, ROLES, FormatName, list_text_columns
from shardscope_widgets.kit import controls

TITLES: dict[FormatName, str] = {
    "prompt-completion": "Questions and answers",
    "text": "Texts",
    "messages": "Conversations",
    "instruction": "Instructions with an input",
    "preference": "Pairs of a chosen and a rejected answer",
}
ROLE_TITLES = {
    "prompt": "Question",
    "completion": "Answer",
    "text": "Text",
    "messages": "Messages",
    "instruction": "Instruction",
    "input": "Input",
    "output": "Answer",
    "chosen": "Chosen",
    "rejected": "Rejected",
}
NO_COLUMN = "(none)"
UNKNOWN_NAMES = "The columns have no known names: say what they are."
LABEL_WIDTH = "76px"


class ColumnMenus(widgets.VBox):
    """Menus for the kind of the rows and the column of each part.

    ``columns`` is the mapping; None until it is chosen.
    """

    columns = traitlets.Any(
        allow_none=True, default_value=None, help="Role -> column, for ``ss.Finetune(columns=...)``."
    )

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._is_offering = False
        self.format = controls.create_dropdown(
            options=[(title, name) for name, title in TITLES.items()], tooltip="What each row of the data is"
        )
        self.menus = [
            controls.create_dropdown(options=[NO_COLUMN]) for _ in range(max(map(len, ROLES.values())))
        ]
        self._labels = [controls.create_label("", LABEL_WIDTH) for _ in self.menus]
        self._rows = [_create_row(label, menu) for label, menu in zip(self._labels, self.menus, strict=True)]
        self.button = controls.create_button("Use these columns", "ss-ghost", "ss-small")
        self.button.on_click(lambda _: self._choose())
        self.hint = controls.create_html(UNKNOWN_NAMES, "ss-hint")
        super().__init__(
            [
                self.hint,
                _create_row(controls.create_label("Rows are", LABEL_WIDTH), self.format),
                *self._rows,
                self.button,
            ],
            layout=controls.share_layout(),
        )
        self.add_class("ss-columns")
        self.format.observe(self._show_roles, "value")
        for menu in self.menus:
            menu.observe(self._follow_menu, "value")
        self.hide()

    def offer(
        self, names: Sequence[str], chat_column: str | None = None, first_row: str = "", header: str = ""
    ) -> None:
        """Show the menus for these columns; nothing is applied yet.

        The column of conversations is chosen, or else the first ones of texts. ``first_row`` is the first
        line of a file if it may be a row, and ``header`` a line of names that could be above it.
        """
        self.hint.value = _warn_of_first_row(first_row, header) if first_row else UNKNOWN_NAMES
        if tuple(names) != self._names:
            self._names, self.columns = tuple(names), None
            of_texts: FormatName = "text" if len(list_text_columns(names)) == 1 else "prompt-completion"
            self.format.value = "messages" if chat_column else of_texts
            self._show_roles()
            if chat_column:
                self.menus[0].value = chat_column
        self.remove_class("ss-off")

    def hide(self) -> None:
        """Hide the menus and forget the mapping: the data are other ones."""
        self._names, self.columns = (), None
        self.add_class("ss-off")

    def _show_roles(self, change: object = None) -> None:
        """Show one menu for each role of the format."""
        roles, suggested = ROLES[self.format.value], list_text_columns(self._names)
        # With too few columns an optional part has none: two parts of one column would be an error.
        optional = {role for role in roles if (self.format.value, role) in OPTIONAL_ROLES}
        left_out = optional if len(suggested) < len(roles) else set[str]()
        wanted = [role for role in roles if role not in left_out]
        self._is_offering = True
        try:
            for index, (menu, label, row) in enumerate(
                zip(self.menus, self._labels, self._rows, strict=True)
            ):
                controls.show_if(row, index < len(roles))
                if index >= len(roles):
                    continue
                is_optional = roles[index] in optional
                label.value = ROLE_TITLES[roles[index]]
                menu.options = [*([NO_COLUMN] if is_optional else []), *self._names]
                menu.tooltip = f"Column of the {label.value.lower()}"
                if roles[index] in left_out:
                    menu.value = NO_COLUMN
                elif suggested:
                    menu.value = suggested[min(wanted.index(roles[index]), len(suggested) - 1)]
        finally:
            self._is_offering = False
        self._follow_menu()

    def _follow_menu(self, change: object = None) -> None:
        # Once chosen, another column is applied at once.
        if self.columns is not None and not self._is_offering:
            self._choose()
        controls.show_if(self.button, self.columns is None)

    def _choose(self) -> None:
        roles = ROLES[self.format.value]
        chosen = {role: menu.value for role, menu in zip(roles, self.menus, strict=False)}
        self.columns = {role: name for role, name in chosen.items() if name != NO_COLUMN}
        self.button.add_class("ss-off")


def _warn_of_first_row(line: str, header: str) -> str:
    """Return why the first row of a file without names would be lost, and how to keep it."""
    return (
        f"<span role='alert' class='ss-caution'>The first line of the file, <q>{escape(line)}</q>, may be a "
        "row. It is taken for the names of the columns and is not trained on. If it is a row, add a line "
        f"with names above it, such as <code style='white-space:pre-wrap'>{header}</code>.</span> "
        "If these are names, say what the columns are."
    )


def _create_row(label: widgets.Label, menu: widgets.Dropdown) -> widgets.HBox:
    row = widgets.HBox([label, menu], layout=controls.share_layout())
    row.add_class("ss-row")
    return row
