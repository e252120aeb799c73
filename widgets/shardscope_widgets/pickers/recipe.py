"""What to train: method, precision, sequence length, batches, recomputation."""

from __future__ import annotations

from dataclasses import fields, replace
from html import escape
from typing import get_args

import ipywidgets as widgets

import shardscope as ss
from shardscope.recipe import Method, Precision, Recompute
from shardscope_widgets.pickers.base import Picker, Row, segments, text_input, typed_number

METHODS = {"full": "full", "lora": "LoRA", "qlora": "QLoRA"}


class RecipePicker(Picker):
    """The training recipe; what is not shown keeps ``Recipe``'s defaults."""

    heading = "Training"

    def __init__(self, recipe: ss.Recipe | None = None) -> None:
        recipe = recipe or ss.Recipe()
        self._base = recipe
        self._taking = False
        self.method = segments([(METHODS[name], name) for name in get_args(Method)], "Method")
        self.method.value = recipe.method
        self.lora_rank = text_input(recipe.adapter_rank, "Rank of the LoRA adapters", "52px")
        self.precision = widgets.Dropdown(
            options=list(get_args(Precision)), value=recipe.precision, tooltip="Precision"
        )
        self.seq_len = text_input(recipe.seq_len, "Tokens in one sequence")
        self.micro = text_input(recipe.micro_batch_size, "Sequences that a GPU takes at once", "44px")
        self.global_batch = text_input(recipe.global_batch_size, "Sequences in one optimizer step", "64px")
        for box in (self.micro, self.global_batch, self.lora_rank):
            box.layout.flex = "0 0 auto"
        self.recompute = segments([(name, name) for name in get_args(Recompute)], "Recompute activations")
        self.recompute.value = recipe.recompute
        each, total = widgets.Label("a GPU,"), widgets.Label("in all")
        for label in (each, total):
            label.layout.flex = "0 0 auto"
        batch = Row("Batch", self.micro, each, self.global_batch, total)
        self._rank_row = Row("LoRA rank", self.lora_rank)
        self.also = widgets.HTML()
        self.also.add_class("ss-hint")
        self.reset = widgets.Button(description="Back to defaults", layout=widgets.Layout(display="none"))
        self.reset.add_class("ss-link")
        self.reset.on_click(self._forget_unshown)
        super().__init__(
            {
                "method": Row("Method", self.method),
                "lora_rank": self._rank_row,
                "precision": Row("Precision", self.precision),
                "seq_len": Row("Sequence", self.seq_len),
                "global_batch_size": batch,
                "micro_batch_size": batch,
                "recompute": Row("Recompute", self.recompute),
            },
            widgets.VBox([self.also, self.reset]),
        )
        for control in (
            self.method,
            self.lora_rank,
            self.precision,
            self.seq_len,
            self.micro,
            self.global_batch,
            self.recompute,
        ):
            control.observe(self.read, "value")
        self.read()

    def take(self, recipe: ss.Recipe) -> None:
        """Set the inputs to ``recipe``; what has no input of its own is kept beside them."""
        self._taking = True
        try:
            self._base = recipe
            self.method.value = recipe.method
            self.lora_rank.value = str(recipe.adapter_rank)
            self.precision.value = recipe.precision
            self.seq_len.value = str(recipe.seq_len)
            self.micro.value = str(recipe.micro_batch_size)
            self.global_batch.value = str(recipe.global_batch_size)
            self.recompute.value = recipe.recompute
        finally:
            self._taking = False
        self.read()

    def _forget_unshown(self, _: object) -> None:
        """Give fields without an input their defaults again."""
        self._base = ss.Recipe()
        self.read()

    def _say_unshown(self) -> None:
        """Name what a mend or a script set and no input shows: nothing works in hiding."""
        recipe, default = self.value, ss.Recipe()
        names = [field.name for field in fields(recipe) if field.name not in self.rows]
        changed = [name for name in names if getattr(recipe, name) != getattr(default, name)]
        parts = ", ".join(f"{name.replace('_', ' ')} {getattr(recipe, name)}" for name in changed)
        self.also.value = f"Also: {escape(parts)}" if parts else ""
        self.reset.layout.display = "" if parts else "none"

    def make(self) -> ss.Recipe:
        """The recipe that the inputs describe."""
        lora = self.method.value != "full"
        base = self._base
        if not lora:
            base = replace(
                base, method="full", lora_rank=None, lora_targets=None, lora_dropout=0.0, quantization=None
            )
        if self.recompute.value == "none":
            base = replace(base, recompute="none", recompute_interval=1)
        return replace(
            base,
            method=self.method.value,
            precision=self.precision.value,
            seq_len=typed_number(self.seq_len.value),
            micro_batch_size=typed_number(self.micro.value),
            global_batch_size=typed_number(self.global_batch.value),
            recompute=self.recompute.value,
            lora_rank=typed_number(self.lora_rank.value) if lora else None,
        )

    def read(self, change: object = None) -> None:
        """Take the inputs over; the rank is asked for only with LoRA."""
        if self._taking:
            return
        self._rank_row.layout.display = "" if self.method.value != "full" else "none"
        super().read(change)
        if self.value is not None:
            self._say_unshown()
