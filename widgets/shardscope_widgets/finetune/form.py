"""The form of a fine-tune: its inputs, and the plan and task that they lead to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from html import escape
from pathlib import Path

import shardscope as ss
from shardscope.core.number_format import format_count
from shardscope.training.examples.formats import UnknownColumnsError
from shardscope.training.examples.preview import Preview
from shardscope.training.examples.rows import describe_source
from shardscope.training.preferences.settings import describe_reference
from shardscope.training.tasks.choices import Length
from shardscope.training.tasks.recommended_length import CPU_MAX_LENGTH, explain_cpu_length
from shardscope_widgets.data.data_panel import DataPanel
from shardscope_widgets.data.preview_view import PreviewView
from shardscope_widgets.finetune.inputs import FinetuneInputs
from shardscope_widgets.finetune.settings import FinetuneSettings
from shardscope_widgets.finetune.setup import (
    READING_FIELDS,
    Settings,
    Setup,
    build_first_plan,
    build_setup,
    find_weights,
    hold_out,
)
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.display_names import describe_devices
from shardscope_widgets.kit.fold import Fold
from shardscope_widgets.kit.notice import WRONG_INPUT
from shardscope_widgets.pickers.recipe_choices import CHOICE_LABELS
from shardscope_widgets.run.run_html import format_duration

NOTHING_CHOSEN = "Choose a model and a data file."
NO_MODEL, NO_DATA = "Choose a model.", "Choose a data file to train on."
UNKNOWN_COLUMNS = "Say what the columns of the data are."
NO_GPU_TYPE = "Choose the type of the GPUs below the button."
NOT_HERE = "is not on this machine yet: download it with the button below its name."
READING = "Reading the data…"


class FinetuneForm:
    """Inputs and their result: ``setup``, or ``message`` with the reason why there is none.

    ``on_change()`` is called after every change of them; the view places ``inputs``, ``folds`` and ``note``.
    ``has_recipe``: the form has inputs for fields of the recipe as well.
    """

    def __init__(
        self,
        machine: ss.Cluster,
        weights: str | Path = "",
        data: object = "",
        *,
        on_change: Callable[[], None],
        has_recipe: bool = True,
    ) -> None:
        self._machine: ss.Cluster | None = machine
        self._on_change = on_change
        self.setup: Setup | None = None
        self.message = ""
        self._is_updating, self._is_closed = False, False
        # Without an event loop, the data are read and reported in another thread.
        self._lock = threading.RLock()
        self._seq_len: tuple[object, int] | None = None
        """The data, and the sequence length that fits them."""
        self.data_panel = DataPanel(
            on_length=self._use_length,
            hold_out=lambda task, preview: hold_out(task, preview, self.settings.value),
        )
        self._mapped_data: object = None
        """The data whose columns the menus are about."""
        self.inputs = FinetuneInputs(machine, self.data_panel, data)
        self.settings = FinetuneSettings(has_recipe=has_recipe)
        self.note = controls.create_html("", "ss-hint")
        self.preview = PreviewView(on_length=self.data_panel.use_length)
        self.folds = {
            "Data": Fold("What the model learns", self.preview),
            "Advanced": Fold("Advanced", self.settings),
        }
        self.folds["Advanced"].follow_picker(self.settings)
        self.data_panel.on_show = self._show_preview
        self.inputs.on_fetched = self.update
        self.inputs.observe(self.update, "value")
        self.inputs.columns.observe(self.update, "columns")
        self.settings.observe(self.update, "value")
        self.data_panel.observe(self.update, ["preview", "problem"])
        self.inputs.weights.value = str(weights)
        self.update()

    @property
    def preview_of_data(self) -> Preview | None:
        """The data as they were last read."""
        preview = self.data_panel.preview
        return preview if isinstance(preview, Preview) else None

    def set_machine(self, machine: ss.Cluster | None) -> None:
        """Plan for other GPUs; None while their type is not known."""
        with self._lock:
            self._machine = machine
            if machine is not None:
                self.inputs.set_has_gpu(machine.gpu.vendor != "cpu")
            self.update()

    def close(self) -> None:
        """Ignore what is still being read or downloaded."""
        self._is_closed = True

    def update(self, change: object = None) -> None:
        """Build plan and task from the inputs, or show what is missing or wrong."""
        with self._lock:
            if not self._is_updating and not self._is_closed:
                self._update_setup()

    def _update_setup(self) -> None:
        self._is_updating = True
        for picker in (self.inputs, self.settings):
            picker.clear_plan_errors()
        setup, message = None, ""
        try:
            setup, message = self._build_setup()
        except ValueError as error:
            self.show_error(error)
            message = WRONG_INPUT
        except Exception as error:  # An exception raised in a handler would not be shown.
            self.show_error(ValueError(f"Internal error of Shardscope: {type(error).__name__}: {error}"))
            raise
        finally:
            self._is_updating = False
            self._show_setup(setup, message)

    def _build_setup(self) -> tuple[Setup | None, str]:
        """Return the setup; None with the reason while an input is empty or being read."""
        weights_text, data, method = self.inputs.value
        machine = self._machine
        if machine is None:
            return None, NO_GPU_TYPE
        if not weights_text:
            self.data_panel.set_task(None, None)
            return None, NO_MODEL if data else NOTHING_CHOSEN
        weights, settings = find_weights(weights_text), self.settings.value
        if weights is None:
            self.data_panel.set_task(None, None)
            return None, f"{weights_text} {NOT_HERE}"
        columns = self._read_columns(data)
        # The recommended length cuts a few long rows, which are left out.
        reading: dict[str, object] = {"bad_rows": "skip_truncated"}
        reading |= {name: settings[name] for name in READING_FIELDS if name in settings}
        base = as_typed = ss.Finetune(weights, data or None, columns=columns, **reading)  # type: ignore[arg-type]
        if not data:
            self.data_panel.set_task(None, None)
            return None, NO_DATA
        source = (base.weights, base.data, machine.gpu.vendor)
        seq_len = self._seq_len[1] if self._seq_len and self._seq_len[0] == source else None
        first = build_first_plan(base.weights, machine, method, settings, seq_len)
        if base.plain_text is not None:
            self.data_panel.set_task(None, None)
            return build_setup(base, first, settings, None), ""
        validation = settings.get("validation")
        self.data_panel.set_task(base, first, validation)
        problem, preview = self.data_panel.problem, self.preview_of_data
        # Those of the validation data have no menus.
        if isinstance(problem, UnknownColumnsError) and preview is None:
            self._mapped_data = data
            self.inputs.columns.offer(
                problem.column_names, problem.chat_column, problem.first_row, problem.header
            )
            return None, UNKNOWN_COLUMNS
        if problem is not None:
            raise problem.with_traceback(None)
        if preview is None:
            return None, READING
        if preview.has_pairs:
            base = replace(base, objective="dpo")
        if self.data_panel.advice is not None and "seq_len" not in settings and seq_len is None:
            # Read the data once more, cut to the length that fits them.
            self._seq_len = (source, self.data_panel.advice.seq_len)
            first = build_first_plan(base.weights, machine, method, settings, self._seq_len[1])
            self.data_panel.set_task(as_typed, first, validation)
        elif preview.refusal is not None:
            raise preview.refusal.with_traceback(None)
        return build_setup(base, first, settings, preview), ""

    def _read_columns(self, data: object) -> dict[str, str] | None:
        """Return the mapping chosen for these data; the menus are hidden for others."""
        mapped = self._mapped_data
        is_same = data == mapped if isinstance(data, str) and isinstance(mapped, str) else data is mapped
        if not is_same:
            self._mapped_data = None
            self.inputs.columns.hide()
        columns: dict[str, str] | None = self.inputs.columns.columns
        return columns

    def show_error(self, error: ValueError) -> None:
        """Show ``error`` at the input that it names."""
        field = str(getattr(error, "field", "")).rpartition(".")[2]
        owner = self.settings if field in self.settings.rows else self.inputs
        owner.show_plan_error(self.settings.correct_fix(error) if owner is self.settings else error)

    def _use_length(self, seq_len: int) -> None:
        self.settings.set_fields({"seq_len": seq_len})

    def _show_setup(self, setup: Setup | None, message: str) -> None:
        self.setup, self.message = setup, message
        preview = self.preview_of_data
        if preview is not None:
            self.preview.show(preview, self.data_panel.advice)
        controls.show_if(self.folds["Data"], preview is not None)
        self.note.value = (
            "" if setup is None else escape(describe_method(setup, preview, self.settings.value))
        )
        if setup is not None:
            self.settings.show_choices(setup.choices)
        self._on_change()

    def _show_preview(self) -> None:
        self.folds["Data"].head.expanded = True


def render_missing(message: str) -> str:
    """Return what is missing before a launch as HTML; at the start, also that nothing else is needed."""
    if message == NOTHING_CHOSEN:
        message += " Nothing else is needed for a good result; Advanced shows the rest."
    return f"<div class='ss-what' role='status'>{escape(message)}</div>" if message else ""


def render_summary(plan: ss.Plan, task: ss.Finetune, length: Length, num_rows: int | None) -> str:
    """Return what the button will do as HTML; ``num_rows`` is None for a text."""
    row = "preference pair" if task.objective == "dpo" else "row"
    rows = "" if num_rows is None else format_count(num_rows, row)
    # A frame has no name.
    name = task.data.name if isinstance(task.data, Path) else task.data if isinstance(task.data, str) else ""
    data = " of ".join(filter(None, [rows, name]))
    batch = format_count(plan.recipe.global_batch_size, "sequence")
    steps = "" if length.num_steps is None else f", {format_count(length.num_steps, 'step')} of {batch}"
    epochs = length.num_epochs
    passes = f" in {epochs:g} epoch{'s' * (epochs != 1)}" if epochs is not None else ""
    rank = f" of rank {plan.recipe.adapter_rank}" if plan.recipe.has_adapters else ""
    method = CHOICE_LABELS[plan.recipe.method] if plan.recipe.has_adapters else "full fine-tuning"
    seconds = f", about {format_duration(length.seconds)}" if length.seconds is not None else ""
    by = " by <b>DPO</b>" if task.objective == "dpo" else ""
    alone = ", its language model alone," if task.folder.multimodal_type else ""
    return (
        f"<div class='ss-what' role='status'><b>{escape(plan.architecture.name)}</b>{alone} learns "
        f"from <b>{escape(data)}</b>{by}{passes}{steps}, with <b>{escape(method)}</b>{rank} on "
        f"<b>{escape(describe_devices(plan.cluster))}</b>{seconds}</div>"
    )


def describe_method(setup: Setup, preview: Preview | None, settings: Settings) -> str:
    """Return how the run decides which weights it keeps, and what long rows and DPO's reference cost."""
    validation = describe_validation(setup.task, is_chosen="validation" in settings)
    if setup.plan.recipe.seq_len > CPU_MAX_LENGTH:
        validation += explain_cpu_length(setup.plan)
    if setup.task.objective != "dpo":
        return validation
    return f"{validation} {describe_reference(setup.plan, None if preview is None else preview.num_rows)}"


def describe_validation(task: ss.Finetune, *, is_chosen: bool) -> str:
    """Return how the run decides which weights it keeps; ``is_chosen``: the user has set the validation."""
    if task.validation is None:
        why = "No data are held out" if is_chosen else "Too few data to hold some out"
        return f"{why} for validation: the last weights are kept."
    held_out = (
        f"{100 * task.validation:.3g} % of the data are held out for validation."
        if isinstance(task.validation, float)
        else f"Validated on {describe_source(task.validation)}."
    )
    return (
        f"{held_out} The weights with the lowest loss on "
        f"them are kept, and training ends after {task.early_stopping} validations without a lower one."
    )
