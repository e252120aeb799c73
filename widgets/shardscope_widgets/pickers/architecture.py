"""Which model: a name of the catalogue or the Hub, a size, or a config.json."""

from __future__ import annotations

import re
from pathlib import Path

import ipywidgets as widgets

import shardscope as ss
from shardscope.catalog import model_names
from shardscope.validation import FieldError
from shardscope_widgets.kit import controls
from shardscope_widgets.pickers.base import Picker, Row

SIZE = re.compile(r"\d+(\.\d+)?\s*[kmbtKMBT]")


class ArchitecturePicker(Picker):
    """Type to search the catalogue; "7b" is a Llama-shaped model of that size; a path reads a config.json."""

    heading = "Model"

    def __init__(self, name: str = "llama-3.1-8b") -> None:
        self.name = widgets.Combobox(
            layout=controls.filling(),
            value=name,
            options=list(ss.models),
            continuous_update=False,
            placeholder="name, size (7b) or config.json",
            tooltip="Model: its name here or on the Hub, a size such as 7b, or the path of a config.json",
        )
        self.hint = controls.html("", "ss-hint")
        self._taken: dict[str, ss.Architecture] = {}
        super().__init__({"model": Row("Model", self.name)}, self.hint)
        self.name.observe(self.read, "value")
        self.read()

    def make(self) -> ss.Architecture:
        """The architecture that the text names."""
        text = self.name.value.strip()
        # "meta-llama/Llama-3.1-8B" may be a folder here as well, and then is what is in there.
        if text in ss.models and not ("/" in text and _exists(text)):
            return ss.models[text]
        if text in self._taken:
            return self._taken[text]
        if SIZE.fullmatch(text):
            return ss.Architecture.of_size(text.replace(" ", ""))
        # Only what lies on this machine: any other hub id would make the kernel wait for the network.
        if text and _exists(text):
            return ss.Architecture.from_hf(Path(text))
        raise FieldError(
            "model",
            text,
            "a name of the catalogue or the Hub's name for one of its models, a size such as 7b, or the path "
            "of a config.json that exists",
            (model_names().nearest(text) or "another, for it is not in the catalogue") if text else "7b",
        )

    def take(self, architecture: ss.Architecture) -> None:
        """Set the input to an architecture that another view made, under its own name."""
        self._taken[architecture.name] = architecture
        self.name.value = architecture.name

    def read(self, change: object = None) -> None:
        """Take the text over and say what it stands for."""
        super().read(change)
        arch = self.value
        if arch is not None:
            experts = arch.mixture_of_experts
            mixture = (
                f" · {experts.num_experts} experts, {experts.num_experts_per_tok} a token" if experts else ""
            )
            self.hint.value = (
                f"{arch.num_parameters:,} parameters · {arch.num_hidden_layers} layers · "
                f"{arch.hidden_size:,} wide · "
                f"{arch.num_attention_heads}/{arch.num_key_value_heads} heads{mixture}"
            )


def _exists(text: str) -> bool:
    """Whether ``text`` is a path of something; what cannot be a path at all is none."""
    try:
        return Path(text).exists()
    except (OSError, ValueError):
        return False
