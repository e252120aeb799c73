"""Opening a plan from a file: its own JSON, or a configuration of accelerate, DeepSpeed or Megatron-LM."""

from __future__ import annotations

import json
import re
import tempfile
import warnings
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets as widgets

import shardscope as ss
from shardscope.validation import refuse
from shardscope_widgets.kit import controls
from shardscope_widgets.pickers.base import Row

MAX_BYTES = 4 * 2**20
MAPPING = re.compile(r"^\w+:", re.MULTILINE)
"""A key of a YAML mapping, which Megatron-LM's arguments do not have."""
NOUNS = {"architecture", "cluster", "recipe", "layout"}
DEEPSPEED_KEYS = {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "fp16", "bf16"}
ALLOWED = "a plan's JSON, an accelerate YAML or JSON, a DeepSpeed JSON or Megatron-LM's arguments"


def read_plan(path: Path, current: ss.Plan) -> ss.Plan:
    """Return the plan in ``path``; what the file does not hold is ``current``'s.

    Raises ``ValueError`` for a file that cannot be read, is none of the four, or holds what cannot run.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        text = data.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        refuse("OpenPlan.path", str(path), ALLOWED, f"the path of such a file ({error})")
    if len(data) > MAX_BYTES:
        refuse("OpenPlan.path", str(path), f"a file of at most {MAX_BYTES >> 20} MiB", "another file")
    given = {"architecture": current.architecture, "cluster": current.cluster, "recipe": current.recipe}
    if text.lstrip().startswith("{"):
        return _read_json(path, text, given)
    if "--" in text and not MAPPING.search(text):
        return ss.Plan.from_megatron(path, **given)
    return ss.Plan.from_accelerate(path, **given)


def _read_json(path: Path, text: str, given: dict[str, Any]) -> ss.Plan:
    try:
        keys = set(json.loads(text))
    except ValueError as error:
        refuse("OpenPlan.path", str(path), ALLOWED, f"valid JSON ({error})")
    if keys & NOUNS or "plan" in keys:
        return ss.Plan.from_json(text)
    if keys & DEEPSPEED_KEYS and "distributed_type" not in keys:
        return ss.Plan.from_deepspeed(path, **given)
    return ss.Plan.from_accelerate(path, **given)


class OpenPlan(widgets.VBox):
    """A path or an upload; ``on_open`` gets the plan, ``current`` returns what the file leaves out."""

    def __init__(self, on_open: Callable[[ss.Plan], None], current: Callable[[], ss.Plan]) -> None:
        self._on_open, self._current = on_open, current
        tooltip = f"Open a plan: the path of {ALLOWED}"
        self.path = controls.text("", tooltip, placeholder="plan or config file")
        self.upload = widgets.FileUpload(
            description="",
            icon="upload",
            multiple=False,
            layout=controls.fixed("34px"),
            tooltip="Upload a file",
        )
        self.row = Row("Open plan", self.path, self.upload)
        self.words = controls.html("", "ss-hint")
        super().__init__([self.row, self.words], layout=controls.layout())
        self.add_class("ss-open-plan")
        self.path.observe(self._open_path, "value")
        self.upload.observe(self._open_upload, "value")

    def _open_path(self, change: object = None) -> None:
        text = self.path.value.strip()
        if text:
            self._open(lambda: Path(text).expanduser())
        else:
            self.row.show_error("")

    def _open_upload(self, change: object = None) -> None:
        for uploaded in self.upload.value:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / (Path(uploaded["name"]).name or "plan")
                path.write_bytes(bytes(uploaded["content"]))
                self._open(lambda path=path: path)
        self.upload.value = ()

    def _open(self, find: Callable[[], Path]) -> None:
        self.words.value = ""
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                plan = read_plan(find(), self._current())
        except (ValueError, RuntimeError) as error:
            self.row.show_error(str(error))
            return
        self.row.show_error("")
        ignored = " ".join(str(each.message) for each in caught)
        self.words.value = escape(ignored)
        self._on_open(plan)
