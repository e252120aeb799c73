"""The model picker: a name from the catalogue or the Hub, a size, or a config.json."""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from pathlib import Path

import ipywidgets as widgets
import traitlets

import shardscope as ss
from shardscope.catalog import load_model_names
from shardscope.core.errors import FieldError, refuse
from shardscope.training.weights.example_models import EXAMPLES, find_example
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.numbers import format_short
from shardscope_widgets.pickers.base import Picker, Row

SIZE = re.compile(r"\d+(\.\d+)?\s*[kmbtKMBT]")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
NUMBER = re.compile(r"\d+(?:\.\d+)?")
MIN_SIMILARITY = 0.8
"""Minimum similarity at which a name counts as misspelt."""


class ArchitecturePicker(Picker):
    """A catalogue search; "7b" is a Llama-shaped model of that size; a path reads a config.json."""

    weights_folder = traitlets.Any(
        allow_none=True, default_value=None, help="The chosen folder, if it holds weights to begin from."
    )

    def __init__(self, name: str = "llama-3.1-8b") -> None:
        # A Combobox accepts texts that are not among its options, unlike a Dropdown.
        self.name = widgets.Combobox(
            layout=controls.share_filling_layout(),
            value=name,
            options=list(ss.models),
            continuous_update=False,
            placeholder="name, size (7b) or folder",
            tooltip="A model's name in the catalogue or on the Hugging Face Hub, a size such as 7b, or the "
            "path of a folder or config.json",
        )
        self.hint = controls.create_html("", "ss-hint")
        self._weights: Path | None = None
        """The weights folder that :meth:`build_value` found last."""
        self._named_architectures: dict[str, ss.Architecture] = {}
        """Architectures set by other views, by the text that represents them."""
        self._folders: dict[str, ss.Architecture] = {}
        """Paths that were read, with their content."""
        super().__init__({"model": Row("Model", self.name)}, self.hint)
        self.name.observe(self.read, "value")
        controls.read_again(self.name, self.read)
        self.read()

    @property
    def boxes(self) -> dict[str, widgets.ValueWidget]:
        """See :class:`Picker`."""
        return {"model": self.name, "name": self.name}

    def build_value(self) -> ss.Architecture:
        """Return the architecture given by the text."""
        text = self.name.value.strip()
        self._weights = None
        # "meta-llama/Llama-3.1-8B" may also be a local folder, which takes precedence.
        if text in ss.models and not ("/" in text and _path_exists(text)):
            return ss.models[text]
        if text in self._named_architectures:
            return self._named_architectures[text]
        # Sizes after names and set architectures, before paths: a file called "7b" has to be entered as ./7b.
        if SIZE.fullmatch(text):
            return ss.Architecture.of_size(text.replace(" ", ""))
        # Only local files: for any other Hub id the kernel would wait for the network.
        path = Path(text).expanduser() if text and _path_exists(text) else None
        if path is None and text in EXAMPLES:
            path = find_example(text)
        if path is not None and path.is_dir() and not (path / "config.json").is_file():
            allowed = "a folder with the model's config.json, and model.safetensors to fine-tune it"
            refuse("model", text, allowed, "the folder of a model", f"There is no config.json in {text[:60]}")
        if path is not None:
            architecture = ss.Architecture.from_hf(path)
            # Reinserted, so that the dictionary ends with the path that was read last.
            self._folders.pop(text, None)
            self._folders[text] = architecture
            self._weights = path.resolve() if path.is_dir() and _has_weights(path) else None
            return architecture
        near = _find_nearest_model(text)
        fix = near or "a size such as 7b, or the path of the model's folder"
        if not near and HUB_NAME.fullmatch(text):
            command = f"hf download {text} --local-dir {text.rpartition('/')[2]}"
            fix = f"the path of the model's folder; one of the Hub is downloaded with {command}"
        raise FieldError(
            "model",
            text,
            "a model of the catalogue by its name or its Hugging Face name, a size such as 7b, or the "
            "path of an existing config.json",
            fix,
            f"{text[:60]!r} is not in the catalogue and is not a path" if text else "No model entered",
        )

    def changes_of(self, error: FieldError) -> dict[str, object]:
        """Return the fix (see :class:`Picker`): the closest name for a misspelt one."""
        # The fix of other errors, such as "a size such as 7b", cannot be typed into the input as it is.
        is_name = error.field == "model" and error.fix in ss.models
        return {"model": error.fix} if is_name else super().changes_of(error)

    def set_folder(self, folder: Path) -> None:
        """Set the input to ``folder``, or to the name of the example model that is in it."""
        names = (name for name in EXAMPLES if (example := find_example(name)) and example == folder)
        text = next(names, _shorten_path(folder))
        if self.name.value == text:
            self.read()  # It may have been downloaded meanwhile.
        self.name.value = text

    def set_value(self, architecture: ss.Architecture) -> None:
        """Set the input to an architecture of another view: its folder if it has one, else its name."""
        # Several folders may contain such a model: prefer the one in the input, then the one read last.
        texts = [self.name.value.strip(), *reversed(self._folders)]
        text = next((text for text in texts if self._folders.get(text) == architecture), None)
        if text is None:
            text = architecture.name
            # The catalogue has another model of this name: the text must not stand for both.
            if ss.models.get(text, architecture) != architecture:
                text = f"{text} (changed)"
            self._named_architectures[text] = architecture
        if self.name.value == text:
            self.read()  # The text may represent another model than before.
        self.name.value = text

    def read(self, change: object = None) -> None:
        """Read the text and show what it represents."""
        super().read(change)
        arch = self.value
        if not self.is_wrong:
            self.weights_folder = self._weights
        if arch is not None:
            experts = arch.mixture_of_experts
            mixture = (
                f" · {experts.num_experts} experts, {experts.num_experts_per_tok} per token"
                if experts
                else ""
            )
            self.answer = f"{format_short(arch.num_parameters)}, {arch.num_hidden_layers} layers"
            weights = " · weights found" if self.weights_folder else ""
            self.hint.value = (
                f"{arch.num_parameters:,} parameters · {arch.num_hidden_layers} layers · "
                f"hidden size {arch.hidden_size:,} · {arch.num_attention_heads} heads, "
                f"{arch.num_key_value_heads} KV heads{mixture}{weights}"
            )


def _find_nearest_model(text: str) -> str:
    """Return the catalogue model that ``text`` misspells; empty if it is another model.

    Different numbers mean another model: "llama-9-8b" is not a misspelt "llama-3-8b".
    """
    if not text:
        return ""
    near, name = load_model_names().find_nearest(text), text.lower().rpartition("/")[2]
    if not near:
        return ""
    # A fine-tuned model is usually named after its base: llama-3.1-8b-instruct.
    if name.startswith(near):
        return near
    is_close = SequenceMatcher(None, name, near).ratio() >= MIN_SIMILARITY
    return near if is_close and NUMBER.findall(name) == NUMBER.findall(near) else ""


def _has_weights(folder: Path) -> bool:
    """Return whether ``folder`` has weights in the Hub's format."""
    return any((folder / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json"))


def _shorten_path(folder: Path) -> str:
    """Return the path as short as the input shows it: relative to the notebook's folder, if it is in there.

    With "./": a folder "7b" is not the model of that size.
    """
    try:
        return f"./{folder.relative_to(Path.cwd())}"
    except (ValueError, OSError):
        return str(folder)


def _path_exists(text: str) -> bool:
    """Return whether ``text`` is the path of an existing file or folder."""
    try:
        return Path(text).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        return False
