"""The recipe picker: method, precision, sequence length, batches, recomputation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from html import escape

import ipywidgets as widgets

import shardscope as ss
from shardscope.core.recipe import UNSET_ADAPTER_FIELDS
from shardscope.core.serialization import replace_fields
from shardscope_widgets.kit import controls
from shardscope_widgets.pickers.base import NO_CHANGES, Picker, Row, parse_number
from shardscope_widgets.pickers.recipe_choices import Advanced, list_options


class RecipePicker(Picker):
    """The training recipe, with advanced choices behind a button; hidden fields keep their defaults."""

    def __init__(self, recipe: ss.Recipe | None = None) -> None:
        recipe = recipe or ss.Recipe()
        self._base = recipe
        self._is_setting = False
        self.method = controls.create_segments(list_options("method", None, None), "Method")
        self.method.value = recipe.method
        self.lora_rank = controls.create_text_box(recipe.adapter_rank, "Rank of the LoRA adapters", "52px")
        self.precision = controls.create_dropdown(
            options=list_options("precision", None, None), value=recipe.precision, tooltip="Precision"
        )
        self.seq_len = controls.create_text_box(recipe.seq_len, "Sequence length in tokens")
        self.micro = controls.create_text_box(
            recipe.micro_batch_size, "Micro-batch size: sequences per rank in one forward pass"
        )
        self.global_batch = controls.create_text_box(
            recipe.global_batch_size, "Global batch size: sequences per optimizer step, over all ranks"
        )
        self.recompute = controls.create_dropdown(
            options=list_options("recompute", None, None),
            value=recipe.recompute,
            tooltip="Activation checkpointing: which activations backward recomputes",
        )
        self._rank_row = Row("LoRA rank", self.lora_rank)
        self.advanced = Advanced(recipe)
        self.also = controls.create_html("", "ss-hint")
        self.reset = controls.create_button(
            "Reset to defaults", "ss-link", layout=widgets.Layout(display="none")
        )
        self.reset.on_click(self._reset_hidden_fields)
        super().__init__(
            {
                "method": Row("Method", self.method),
                "lora_rank": self._rank_row,
                "precision": Row("Precision", self.precision),
                "seq_len": Row("Sequence", self.seq_len),
                "micro_batch_size": Row("Micro-batch", self.micro),
                "global_batch_size": Row("Global batch", self.global_batch),
                "recompute": Row("Recompute", self.recompute),
                **self.advanced.rows,
            },
            widgets.VBox([self.also, self.reset], layout=controls.share_layout()),
        )
        # The button is between the basic rows and those that it opens.
        first = self.children.index(self.rows["optimizer"])
        self.children = (*self.children[:first], self.advanced.button, *self.children[first:])
        for control in (
            self.method,
            self.lora_rank,
            self.precision,
            self.seq_len,
            self.micro,
            self.global_batch,
            self.recompute,
            *self.advanced.inputs,
        ):
            control.observe(self.read, "value")
        self.read()

    @property
    def boxes(self) -> dict[str, widgets.ValueWidget]:
        """See :class:`Picker`."""
        return {
            "method": self.method,
            "lora_rank": self.lora_rank,
            "precision": self.precision,
            "seq_len": self.seq_len,
            "micro_batch_size": self.micro,
            "global_batch_size": self.global_batch,
            "recompute": self.recompute,
            **self.advanced.boxes,
        }

    def set_fields(self, values: Mapping[str, object]) -> None:
        """Set inputs by field, and store fields without an input, as one change."""
        self._is_setting = True
        try:
            super().set_fields(values)
            hidden = {name: value for name, value in values.items() if name not in self.boxes}
            self._base = replace_fields(self._base, hidden)
        finally:
            self._is_setting = False
        self.read()

    def set_value(self, recipe: ss.Recipe) -> None:
        """Set the inputs to ``recipe``; fields without an input are stored with them."""
        self._is_setting = True
        try:
            self._base = recipe
            # Read once at the end: a recipe of old and new values may be invalid.
            self.method.value = recipe.method
            self.lora_rank.value = str(recipe.adapter_rank)
            self.precision.value = recipe.precision
            self.seq_len.value = str(recipe.seq_len)
            self.micro.value = str(recipe.micro_batch_size)
            self.global_batch.value = str(recipe.global_batch_size)
            self.recompute.value = recipe.recompute
            self.advanced.set_value(recipe)
        finally:
            self._is_setting = False
        self.read()

    def offer_choices(self, layout: ss.Layout) -> None:
        """Restrict choices to what ``layout``'s framework can run; an unsupported choice shows an error."""
        self._is_setting = True
        try:
            for field, control in (
                ("method", self.method),
                ("precision", self.precision),
                ("recompute", self.recompute),
            ):
                controls.replace_options(control, list_options(field, layout, control.value))
            self.advanced.offer_choices(layout)
        finally:
            self._is_setting = False

    def _show_error_at_input(self, error: Exception) -> None:
        super()._show_error_at_input(error)
        self._fit_rows()

    def _clear_errors(self) -> None:
        super()._clear_errors()
        self._fit_rows()

    def _fit_rows(self) -> None:
        """Show the advanced rows that are requested and applicable, or that have a message."""
        # The base of QLoRA is 4-bit in any case: there is nothing to choose.
        self.advanced.fit_rows(self.method.value == "lora", self.recompute.value != "none")

    def _reset_hidden_fields(self, _: object) -> None:
        """Reset fields without an input to their defaults."""
        self._base = ss.Recipe()
        self.read()

    def _list_hidden_changes(self) -> None:
        """List the fields without an input that a fix or a script has set, so that none is hidden."""
        recipe, default = self.value, ss.Recipe()
        # A fix or an opened file may set any field, also one without a row.
        names = [field.name for field in fields(recipe) if field.name not in self.rows]
        changed = [name for name in names if getattr(recipe, name) != getattr(default, name)]
        parts = ", ".join(f"{name.replace('_', ' ')} {_format(getattr(recipe, name))}" for name in changed)
        self.also.value = f"Also set: {escape(parts)}" if parts else ""
        controls.show_if(self.also, parts)
        self.reset.layout.display = "" if parts else "none"

    def build_value(self, changes: Mapping[str, object] = NO_CHANGES) -> ss.Recipe:
        """Return the recipe given by the inputs, except for ``changes`` by field."""
        lora = self.method.value != "full"
        base = self._base
        # Adapter options of a plan that was opened would be rejected without adapters.
        if not lora:
            base = replace_fields(base, {"method": "full", "quantization": None, **UNSET_ADAPTER_FIELDS})
        values: dict[str, object] = {
            **self.advanced.read_fields(lora, self.recompute.value != "none"),
            "method": self.method.value,
            "precision": self.precision.value,
            "seq_len": parse_number(self.seq_len.value),
            "micro_batch_size": parse_number(self.micro.value),
            "global_batch_size": parse_number(self.global_batch.value),
            "recompute": self.recompute.value,
            "lora_rank": parse_number(self.lora_rank.value) if lora else None,
        }
        return replace_fields(base, {**values, **changes})

    def read(self, change: object = None) -> None:
        """Read the inputs; the rank is shown only with LoRA."""
        if self._is_setting:
            return
        self._rank_row.show(self.method.value != "full")
        super().read(change)
        if self.value is not None:
            self._list_hidden_changes()
            self.answer = _summarize_recipe(self.value)


def _format(value: object) -> str:
    return ", ".join(str(one) for one in value) if isinstance(value, tuple) else str(value)


def _summarize_recipe(recipe: ss.Recipe) -> str:
    """Return ``bf16-mixed, 4,096 tokens``, after the method if that is not full training."""
    method = {"full": "", "lora": "LoRA, ", "qlora": "QLoRA, "}[recipe.method]
    return f"{method}{recipe.precision}, {recipe.seq_len:,} tokens"
