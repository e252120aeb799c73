"""Opening a plan from a file: its own JSON, or a configuration of accelerate, DeepSpeed or Megatron-LM."""

from __future__ import annotations

import json
import re
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from html import escape
from pathlib import Path
from typing import TypedDict

import ipywidgets as widgets

import shardscope as ss
from shardscope.core.errors import FieldError, refuse
from shardscope_widgets.kit import controls
from shardscope_widgets.pickers.base import Row
from shardscope_widgets.run.export_panel import name_folder

MAX_BYTES = 4 * 2**20
MAPPING = re.compile(r"^\w+:", re.MULTILINE)
"""A key of a YAML mapping, which does not occur in Megatron-LM's arguments."""
SCRIPTS = (".sh", ".bash", ".sbatch", ".slurm")
"""Endings of shell scripts, which ``Plan.from_megatron`` reads."""
NOUNS = {"architecture", "cluster", "recipe", "layout"}
DEEPSPEED_KEYS = {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "fp16", "bf16"}
ALLOWED = "a plan's JSON, an accelerate YAML or JSON, a DeepSpeed JSON or Megatron-LM's arguments"


class Defaults(TypedDict, total=False):
    """The parts of a plan that complete a file without them."""

    architecture: ss.Architecture
    cluster: ss.Cluster
    recipe: ss.Recipe


def read_plan(path: Path, current: ss.Plan) -> ss.Plan:
    """Return the plan in ``path``, completed from ``current`` where the file has no value.

    Raises ``ValueError`` for a file that cannot be read, has none of the four formats, or cannot run.
    """
    if not path.is_file():
        refuse("OpenPlan.path", str(path), ALLOWED, "the path of a file", "There is no such file")
    with path.open("rb") as file:
        # One byte more than allowed shows that the file is too large, without reading all of it.
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        allowed = f"a file of at most {MAX_BYTES >> 20} MiB"
        refuse("OpenPlan.path", str(path), allowed, "another file", "The file is too large for a plan")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        refuse("OpenPlan.path", str(path), ALLOWED, "another file", "The file is not UTF-8 text")
    defaults: Defaults = {
        "architecture": current.architecture,
        "cluster": current.cluster,
        "recipe": current.recipe,
    }
    if (path.parent / "plan.json").is_file():
        defaults = {}  # Exported files: values that they lack are read from the plan.json exported with them.
    if text.lstrip().startswith("{"):
        return _read_json(path, text, defaults)
    is_yaml = path.suffix.lower() in (".yaml", ".yml") or MAPPING.search(text) is not None
    if path.suffix.lower() in SCRIPTS or ("--" in text and not is_yaml):
        return _read_megatron(path, defaults)
    return ss.Plan.from_accelerate(path, **defaults)


def _read_megatron(path: Path, defaults: Defaults) -> ss.Plan:
    """Read Megatron-LM's arguments of the current model, or else of the model that they describe."""
    try:
        return ss.Plan.from_megatron(path, **defaults)
    except FieldError:
        if "architecture" not in defaults:
            raise
        try:
            return ss.Plan.from_megatron(path, cluster=defaults["cluster"], recipe=defaults["recipe"])
        except FieldError as error:
            # Flags of no Llama: this error has the model of the catalogue that is nearest to them.
            if error.field == "architecture":
                raise
        raise


def _read_json(path: Path, text: str, defaults: Defaults) -> ss.Plan:
    try:
        keys = set(json.loads(text))
    except (ValueError, RecursionError) as error:
        refuse("OpenPlan.path", str(path), ALLOWED, f"valid JSON ({error})")
    if keys & NOUNS or "plan" in keys:
        return ss.Plan.from_json(text)
    if keys & DEEPSPEED_KEYS and "distributed_type" not in keys:
        return ss.Plan.from_deepspeed(path, **defaults)
    return ss.Plan.from_accelerate(path, **defaults)


def _expand_path(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{text} cannot be read: {error}") from None


class OpenPlan(widgets.VBox):
    """A path or an upload; ``on_open`` receives the plan, ``current`` returns values that the file lacks."""

    def __init__(self, on_open: Callable[[ss.Plan], None], current: Callable[[], ss.Plan]) -> None:
        self._on_open, self._current = on_open, current
        tooltip = f"Open a plan: the path of {ALLOWED}"
        self.path = controls.create_text_box("", tooltip, placeholder="plan or config")
        self.upload = widgets.FileUpload(
            description="",
            icon="upload",
            multiple=False,
            layout=controls.share_fixed_layout("34px"),
            tooltip="Upload a file",
        )
        self.row = Row("Open plan", self.path, self.upload)
        self.save = controls.create_button(
            "Save plan as JSON",
            "ss-link",
            tooltip="Write the plan to a JSON file next to this notebook; Open plan reads it",
        )
        self.words = controls.create_html("", "ss-hint")
        super().__init__([self.row, self.save, self.words], layout=controls.share_layout())
        self.add_class("ss-open-plan")
        self.path.observe(self._open_path, "value")
        self.upload.observe(self._open_upload, "value")
        self.save.on_click(self._save_plan)

    def _open_path(self, change: object = None) -> None:
        text = self.path.value.strip()
        if not text:
            self.row.show_error("")
        elif self._open_file(lambda: _expand_path(text)):
            # Otherwise the same file could not be opened twice in a row: the value would not change.
            self.path.value = ""

    def _open_upload(self, change: object = None) -> None:
        if self.upload.value:
            self.path.value = ""  # The path names another file than the uploaded one.
        for uploaded in self.upload.value:
            content = uploaded["content"]
            if len(content) > MAX_BYTES:
                self.row.show_error(
                    f"{uploaded['name']} has more than {MAX_BYTES >> 20} MiB: too large for a plan."
                )
                continue
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "uploaded" / (Path(uploaded["name"]).name or "plan")
                path.parent.mkdir()
                path.write_bytes(bytes(content))
                self._open_file(partial(Path, path))
        # Otherwise the same file could not be uploaded twice in a row: the value would not change.
        self.upload.value = ()

    def _save_plan(self, _: object) -> None:
        plan = self._current()
        file = Path(f"{name_folder(plan)}.json")
        try:
            file.write_text(plan.to_json() + "\n", encoding="utf-8")
        except OSError as error:
            self.row.show_error(f"{file.absolute()} cannot be written: {error.strerror}.")
            return
        self.row.show_error("")
        self.words.value = f"Saved as {escape(str(file))}"

    def _open_file(self, find_path: Callable[[], Path]) -> bool:
        """Open a file, and return whether it is a plan."""
        self.words.value = ""
        try:
            # Readers warn about settings that a plan cannot express. "always": Python shows a warning once.
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                path = find_path()
                plan = read_plan(path, self._current())
        except (ValueError, OSError) as error:
            short = f"{error.problem}." if isinstance(error, FieldError) and error.problem else ""
            self.row.show_error(str(error), short=short)
            return False
        self.row.show_error("")
        self.words.value = escape(" ".join([f"Opened {path.name}.", *(str(one.message) for one in caught)]))
        self._on_open(plan)
        return True
