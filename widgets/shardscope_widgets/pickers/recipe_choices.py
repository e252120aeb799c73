"""Labels of the recipe's choices, and the inputs of its advanced part."""

from __future__ import annotations

import ipywidgets as widgets

import shardscope as ss
from shardscope.core.recipe import CHOICES, OPEN_CHOICES
from shardscope.prediction.support import list_supported
from shardscope_widgets.kit import controls
from shardscope_widgets.pickers.base import NOTHING, Nothing, Row, parse_number, parse_rate

CHOICE_LABELS: dict[str, str] = {
    "full": "full",
    "lora": "LoRA",
    "qlora": "QLoRA",
    "adamw": "AdamW",
    "adamw_foreach": "AdamW (foreach)",
    "adamw_8bit": "8-bit AdamW",
    "paged_adamw": "Paged AdamW",
    "paged_adamw_8bit": "Paged 8-bit AdamW",
    "adafactor": "Adafactor",
    "sgd": "SGD with momentum",
    "lion": "Lion",
    "muon": "Muon",
    "int8": "8-bit (LLM.int8)",
    "nf4": "4-bit (NF4)",
    "transformers": "transformers",
    "liger": "Liger",
    "compiled": "torch.compile",
    "eager": "eager (unfused)",
    "sdpa": "PyTorch SDPA",
    "flash": "FlashAttention",
}
LOSS_LABELS = {"full": "full logits", "chunked": "chunked logits", "fused": "fused with the output layer"}
OPEN_LABELS = {
    "quantization": "not quantized",
    "kernels": "framework default",
    "attention": "model default",
    "loss": "kernels' default",
}
"""Labels of the choice that leaves a field unset."""
ADVANCED_LABELS = {
    "optimizer": "Optimizer",
    "quantization": "Base weights",
    "kernels": "Kernels",
    "attention": "Attention",
    "loss": "Loss",
}
"""Fields of the advanced part with their labels."""


def list_options(field: str, layout: ss.Layout | None, current: object) -> list[tuple[str, object]]:
    """Return the options of a dropdown of ``field``: what ``layout`` can run, and the current choice.

    A choice that the framework does not support stays in the list, with an error message at the input.
    """
    values = CHOICES.get(field) or OPEN_CHOICES[field]
    if layout is not None:
        possible = list_supported(layout, field)
        values = tuple(value for value in values if value in possible or value == current)
    labels = LOSS_LABELS if field == "loss" else CHOICE_LABELS
    choices: list[tuple[str, object]] = [(labels.get(value, value), value) for value in values]
    return [(OPEN_LABELS[field], NOTHING), *choices] if field in OPEN_LABELS else choices


def to_recipe_value(value: object) -> object:
    """Return a dropdown's value as a recipe value."""
    return None if isinstance(value, Nothing) else value


class Advanced:
    """Rows that most users never need, behind one button; each dropdown offers what can run."""

    def __init__(self, recipe: ss.Recipe) -> None:
        self.dropdowns: dict[str, widgets.Dropdown] = {
            field: controls.create_dropdown(options=list_options(field, None, None), tooltip=label)
            for field, label in ADVANCED_LABELS.items()
        }
        self.interval = controls.create_text_box(
            recipe.recompute_interval, "Recompute every n-th layer", "44px"
        )
        self.dropout = controls.create_text_box(recipe.dropout, "Dropout probability", "64px")
        self.rows: dict[str, Row] = {
            field: Row(label, self.dropdowns[field]) for field, label in ADVANCED_LABELS.items()
        }
        self.rows["recompute_interval"] = Row(
            "Every", self.interval, controls.create_label("layers (1: all)")
        )
        self.rows["dropout"] = Row("Dropout", self.dropout)
        self.button = controls.create_button("More options", "ss-link", icon="chevron-right")
        self.is_open = False
        self._meaningless: set[str] = set()
        self.button.on_click(lambda _: self.show_rows(not self.is_open))
        self.set_value(recipe)
        self.show_rows(False)

    @property
    def boxes(self) -> dict[str, widgets.ValueWidget]:
        """The input of each field."""
        return {**self.dropdowns, "recompute_interval": self.interval, "dropout": self.dropout}

    @property
    def inputs(self) -> list[widgets.Widget]:
        """Every input, for observers."""
        return [*self.dropdowns.values(), self.interval, self.dropout]

    def show_rows(self, is_open: bool) -> None:
        """Show the applicable rows, or hide them; a row with a message stays."""
        self.is_open = is_open
        self.button.icon = "chevron-down" if is_open else "chevron-right"
        for field, row in self.rows.items():
            wanted = is_open and field not in self._meaningless
            row.show(wanted or bool(row.message))

    def fit_rows(self, has_base: bool, recomputes: bool) -> None:
        """Hide the base's type unless ``has_base``, and the interval without recomputation."""
        self._meaningless = {
            field
            for field, has_meaning in (("quantization", has_base), ("recompute_interval", recomputes))
            if not has_meaning
        }
        self.show_rows(self.is_open)

    def set_value(self, recipe: ss.Recipe) -> None:
        """Set the inputs to ``recipe``."""
        for field, dropdown in self.dropdowns.items():
            value = getattr(recipe, field)
            dropdown.value = NOTHING if value is None else value
        self.interval.value = str(recipe.recompute_interval)
        self.dropout.value = f"{recipe.dropout:g}"

    def offer_choices(self, layout: ss.Layout) -> None:
        """Offer the choices that ``layout`` can run, and the current one."""
        for field, dropdown in self.dropdowns.items():
            controls.replace_options(dropdown, list_options(field, layout, dropdown.value))

    def read_fields(self, with_adapters: bool, recomputes: bool) -> dict[str, object]:
        """Return the recipe fields given by these inputs."""
        values = {field: to_recipe_value(dropdown.value) for field, dropdown in self.dropdowns.items()}
        values["dropout"] = parse_rate(self.dropout.value)
        # Without recomputation an interval has no effect, and two equal plans would differ.
        values["recompute_interval"] = parse_number(self.interval.value) if recomputes else 1
        # Recipe accepts quantization only for a frozen base.
        if not with_adapters:
            values["quantization"] = None
        return values
