"""The settings of a fine-tune that most users never change, each with its recommended value and reason."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

import ipywidgets as widgets

from shardscope.core.errors import FieldError, Value
from shardscope.training.optimizers.schedule import SCHEDULER_TYPES
from shardscope.training.tasks.choices import Choices
from shardscope_widgets.finetune.setup import RECIPE_FIELDS, Settings
from shardscope_widgets.kit import controls
from shardscope_widgets.pickers.base import Picker, Row, parse_number, parse_rate

OPTIMIZATION, ADAPTERS, DATA, RUN = "", "Adapters", "Data", "While it trains"
LABELS = {
    "learning_rate": (OPTIMIZATION, "Learning rate"),
    "num_epochs": (OPTIMIZATION, "Epochs"),
    "num_steps": (OPTIMIZATION, "Steps"),
    "seq_len": (OPTIMIZATION, "Sequence length"),
    "global_batch_size": (OPTIMIZATION, "Global batch"),
    "schedule": (OPTIMIZATION, "Schedule"),
    "warmup": (OPTIMIZATION, "Warm-up"),
    "lora_rank": (ADAPTERS, "LoRA rank"),
    "lora_alpha": (ADAPTERS, "LoRA alpha"),
    "lora_targets": (ADAPTERS, "LoRA targets"),
    "loss_on": (DATA, "Loss on"),
    "packing": (DATA, "Packing"),
    "bad_rows": (DATA, "Bad rows"),
    "validation": (RUN, "Validation"),
    "samples": (RUN, "Prompts"),
}
"""Field -> group and label."""
REASONS = {
    "num_steps": "The length of the run, instead of epochs.",
    "schedule": "How the learning rate falls after the warm-up.",
    "warmup": "Share of the steps, or from 1 on their number, in which the rate rises.",
    "lora_alpha": "The adapters' output is scaled by alpha / rank; twice the rank is usual.",
    "loss_on": "What the model learns: all answers of a row, its last one, or every token.",
    "bad_rows": "A row that cannot be trained on: leave it out and count it, refuse the data, or leave out "
    "only what the sequence length cuts before its answer.",
    "validation": "A share of the rows, a data file, or none. The weights with the lowest loss are kept.",
    "samples": "Prompts that the model answers before, during and after training, one per line; empty: from "
    "the data.",
}
"""Reasons for fields whose value does not follow from plan and data."""
MENUS: dict[str, dict[str, object]] = {
    "schedule": {name: name for name in SCHEDULER_TYPES},
    "loss_on": {"all answers": "completions", "the last answer": "last", "every token": "all"},
    "packing": {"yes": True, "no": False},
    "bad_rows": {"skip if cut": "skip_truncated", "skip": "skip", "refuse": "refuse"},
}
"""Field -> its choices, by label. The first entry of each menu takes the recommended value."""
RECOMMENDED = "recommended"
NO_VALIDATION = "none"
WIDTH = "200px"
NUMBERS = ("lora_rank", "seq_len", "global_batch_size", "num_steps")


class FinetuneSettings(Picker):
    """Settings that most users never change; with ``has_recipe`` also those of the recipe.

    An empty input, and the first entry of a menu, take the recommended value.
    """

    def __init__(self, *, has_recipe: bool = True) -> None:
        names = [name for name in LABELS if has_recipe or name not in RECIPE_FIELDS]
        self._boxes = {name: _create_input(name, LABELS[name][1]) for name in names}
        self._reasons = {
            name: controls.create_html(escape(REASONS.get(name, "")), "ss-hint", "ss-reason")
            for name in names
        }
        rows = {name: Row(LABELS[name][1], self._boxes[name], self._reasons[name]) for name in names}
        super().__init__(rows)
        groups = dict.fromkeys(LABELS[name][0] for name in names)
        self._titles = {
            group: controls.create_html(f"<b>{escape(group)}</b>", "ss-settings-group")
            for group in groups
            if group
        }
        self.children = [
            child
            for group in groups
            for child in (
                *([self._titles[group]] if group else []),
                *(row for name, row in rows.items() if LABELS[name][0] == group),
            )
        ]
        self.add_class("ss-finetune-settings")
        for box in self._boxes.values():
            box.observe(self.read, "value")
        self.rows["num_steps"].show(False)
        self.read()

    @property
    def boxes(self) -> Mapping[str, widgets.ValueWidget]:
        """See :class:`Picker`."""
        return self._boxes

    def build_value(self) -> Settings:
        """Return the fields that the user has set, as typed where they are no numbers."""
        values: dict[str, object] = {}
        for name, box in self._boxes.items():
            typed = box.value.strip()
            if typed and typed != RECOMMENDED:
                values[name] = _parse_setting(name, typed)
        return values

    def set_fields(self, values: Mapping[str, object]) -> None:
        """Set inputs by field (see :class:`Picker`), menus by their value."""
        super().set_fields({field: _format_input(field, value) for field, value in values.items()})

    def correct_fix(self, error: ValueError) -> ValueError:
        """Return ``error`` with the recommended value as the fix, where no number is near the input."""
        field = getattr(error, "field", "").rpartition(".")[2]
        placeholder = getattr(self._boxes.get(field), "placeholder", "")
        typed, recommended = self.value.get(field), parse_rate(placeholder)
        if not isinstance(error, FieldError) or isinstance(recommended, str):
            return error
        if not isinstance(typed, str) and error.fix_values != {field: None}:
            return error
        value = int(recommended) if recommended.is_integer() else recommended
        return FieldError(error.field, typed, error.allowed, Value(value))

    def read(self, change: object = None) -> None:
        """Read the inputs."""
        super().read(change)
        self._summarize()

    def _summarize(self) -> None:
        """Name the user's own settings in the answer; those of adapters only while there are some."""
        names = [name for name in self.value if self.rows[name].is_shown]
        own = [f"{LABELS[name][1].lower()} {_shorten_line(self._boxes[name].value)}" for name in names]
        self.answer = ", ".join(own) or "recommended settings"

    def show_choices(self, choices: Choices) -> None:
        """Show the recommended values in the empty inputs, with their reasons."""
        by_field = {choice.field: choice for choice in choices}
        has_adapters = "lora_rank" in by_field
        if (title := self._titles.get(ADAPTERS)) is not None:
            controls.show_if(title, has_adapters)
        for name, box in self._boxes.items():
            choice = by_field.get(name)
            # A full fine-tune has no rank.
            if LABELS[name][0] == ADAPTERS:
                self.rows[name].show(has_adapters)
            # A text has a number of steps, rows have epochs. What the user has typed is never hidden.
            if name in ("num_steps", "num_epochs"):
                is_usual = ("num_steps" in by_field) == (name == "num_steps")
                self.rows[name].show(is_usual or bool(box.value.strip()))
            if choice is not None:
                self._reasons[name].value = escape(choice.why)
            elif name not in REASONS:
                self._reasons[name].value = ""
            shown = "" if choice is None else _format_setting(choice.value)
            if isinstance(box, widgets.Dropdown):
                options = _list_options(name, shown)
                controls.replace_options(box, options)
            else:
                box.placeholder = shown or DEFAULTS.get(name, "")
        self._summarize()


DEFAULTS = {"lora_alpha": "twice the rank", "validation": "0.1", "samples": "three prompts of the data"}
"""Placeholders of inputs without a recommended value of their own."""


def _create_input(name: str, label: str) -> widgets.Text | widgets.Textarea | widgets.Dropdown:
    """Return the input of one setting; empty, it takes the recommended value."""
    tooltip = f"{label}; empty: recommended"
    if name in MENUS:
        layout = controls.share_fixed_layout(WIDTH)
        return controls.create_dropdown(options=_list_options(name, ""), tooltip=label, layout=layout)
    if name == "samples":
        return controls.create_text_area(tooltip, layout=controls.share_fixed_layout(WIDTH))
    return controls.create_text_box("", tooltip, WIDTH)


def _list_options(name: str, recommended: str) -> list[tuple[str, str]]:
    """Return the entries of a menu; ``recommended`` is empty for the first choice."""
    first = recommended or next(iter(MENUS[name]))
    return [(f"{first} (default)", RECOMMENDED), *((label, label) for label in MENUS[name])]


def _format_input(name: str, value: object) -> object:
    """Return a field's value as its input shows it."""
    if name in MENUS:
        return next((label for label, choice in MENUS[name].items() if choice == value), RECOMMENDED)
    if value is None:
        return NO_VALIDATION if name == "validation" else ""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple | list):
        return ("\n" if name == "samples" else ", ").join(map(str, value))
    return value


def _parse_setting(name: str, typed: str) -> object:
    """Return what was typed as the field's type, or unchanged, for the object to reject."""
    if name in MENUS:
        return MENUS[name][typed]
    if name in NUMBERS:
        return parse_number(typed)
    if name == "lora_targets":
        return tuple(filter(None, (part.strip() for part in typed.split(","))))
    if name == "samples":
        return tuple(filter(None, (line.strip() for line in typed.splitlines())))
    if name == "validation" and typed == NO_VALIDATION:
        return None
    return parse_rate(typed)


def _format_setting(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _shorten_line(text: str) -> str:
    line = " / ".join(text.strip().splitlines())
    return line if len(line) <= 40 else f"{line[:39]}…"
