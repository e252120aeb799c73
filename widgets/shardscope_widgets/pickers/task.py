"""The task picker: pretrain, fine-tune the weights of a folder, or run the user's own code.

A fine-tune on rows has a form of its own, whose state the picker is given (:class:`FormState`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Literal, TypedDict, cast

import ipywidgets as widgets
import traitlets

import shardscope as ss
from shardscope.core.errors import FieldError
from shardscope.core.serialization import replace_fields
from shardscope.machine.user_folders import expand_home
from shardscope.planner.checks.usual_rates import limit_rate
from shardscope.training.tasks.recommended_rate import recommend_rate
from shardscope.training.tasks.text_task import resolve_text
from shardscope_widgets.checks.user_code import list_notebook_functions
from shardscope_widgets.kit import controls
from shardscope_widgets.pickers.base import Picker, Row, parse_number, parse_rate

if TYPE_CHECKING:
    from shardscope.runs.launch.context import Context

Kind = Literal["pretrain", "finetune", "own"]
KIND_LABELS: dict[Kind, str] = {
    "pretrain": "Pretrain from random weights",
    "finetune": "Fine-tune this folder's weights",
    "own": "Run my script or function",
}
KIND_SUMMARIES: dict[Kind, str] = {"pretrain": "Pretrain", "finetune": "Fine-tune", "own": "My code"}
CODE, A_SCRIPT = "Task.code", "the path of a .py file"
JOB_OUTLIVES = "The job continues if the kernel stops; Stop, or Cancel while it waits, ends it."
BY_CODE, BY_FORM = "set by the code", "see Fine-tune"
NO_WEIGHTS = (
    "Adapters on random weights learn nothing useful: choose a folder with weights as the model, and "
    "fine-tune it."
)
UNUSED_WEIGHTS = "Training starts from random weights; the folder's weights are not used."
SHIPPED_TEXT = "Moby-Dick"
TEXT_HINT = "A UTF-8 text file to train on; rows, such as a .jsonl file, are for the Fine-tune tab"
ON_TAB = "Model, data and settings are on the Fine-tune tab."
WITHOUT_TEXT = "If empty, trains on Moby-Dick, which ships with Shardscope."


@dataclass(frozen=True, kw_only=True)
class FormState:
    """State of the form of a fine-tune on rows: the task that it describes, or why it is incomplete."""

    task: ss.Finetune | None
    message: str = ""


class KindChange(TypedDict):
    """The change of the menu's value, as traitlets reports it."""

    new: Kind | None


class RunOptions(Picker):
    """Options of a run: its length, learning rate, trace, and whether it continues without the kernel."""

    def __init__(self) -> None:
        self.steps = controls.create_text_box(40, "Optimizer steps", "72px")
        self.rate = controls.create_text_box(
            "", "Peak learning rate; empty: the default for this model", "72px"
        )
        self.profile = _create_checkbox(
            "Record a trace",
            "Profile a few steps after warm-up on every rank, with the sizes of inputs, for the Trace tab. "
            "For stacks, memory or layers: Profile the next steps, on the Run tab, from the launch on.",
            value=True,
        )
        self.outlive = _create_checkbox(
            "Keep running if the kernel stops",
            "If unchecked, the run stops with the kernel. A run that continues is in the Runs tab.",
        )
        self.job_note = controls.create_html(JOB_OUTLIVES, "ss-hint", "ss-off")
        self._row = row = Row("Steps, learning rate", self.steps, self.rate)
        row.add_class("ss-two-lines")
        self._is_job = False
        """Whether a scheduler runs it: a job always continues without the kernel."""
        self.set_by = ""
        """Where length and learning rate are set instead of here, in a few words; empty: here."""
        super().__init__(
            {"num_steps": row, "learning_rate": row},
            controls.stack_vertically(self.profile, self.outlive, self.job_note),
        )
        for control in (self.steps, self.rate, self.profile, self.outlive):
            control.observe(self.read, "value")
        self.read()

    @property
    def boxes(self) -> dict[str, widgets.ValueWidget]:
        """See :class:`Picker`."""
        return {"num_steps": self.steps, "learning_rate": self.rate}

    def build_value(self) -> tuple[object, ...]:
        """Return the inputs as typed; the task itself validates them."""
        return (self.steps.value, self.rate.value, self.profile.value, self.outlive.value)

    def read(self, change: object = None) -> None:
        """Read the inputs and update the answer."""
        super().read(change)
        self._row.show(not self.set_by)
        is_traced = self.set_by != BY_CODE
        controls.show_if(self.profile, is_traced)
        parts = [
            self.set_by or f"{self.steps.value} steps",
            "with trace" if self.profile.value and is_traced else "",
            "survives the kernel" if self.outlive.value and not self._is_job else "",
        ]
        self.answer = ", ".join(filter(None, parts))

    def set_is_job(self, is_job: bool) -> None:
        """Set whether a scheduler runs it."""
        if is_job != self._is_job:
            self._is_job = is_job
            controls.show_if(self.job_note, is_job)
            controls.show_if(self.outlive, not is_job)
            self.read()

    def read_fields(self) -> dict[str, object]:
        """Return the fields of a training task."""
        typed = self.rate.value.strip()
        return {
            "num_steps": parse_number(self.steps.value),
            "profile": self.profile.value,
            "learning_rate": parse_rate(typed) if typed else None,
        }

    def set_task(self, task: ss.Pretrain | ss.Finetune, usual_rate: float) -> None:
        """Set the inputs to those of ``task``; a default learning rate is left empty."""
        if task.planned_steps is not None:
            self.steps.value = str(task.planned_steps)
        self.profile.value = task.profile is True
        self.rate.value = "" if task.learning_rate in (None, usual_rate) else f"{task.learning_rate:g}"


class TaskPicker(Picker):
    """The kind of task and its inputs: a text, or the path or name of the user's code.

    :meth:`set_plan` sets whether the model is a folder with weights: fine-tuning is then available, and the
    default until the user chooses something else. :attr:`form` goes before what is chosen here.
    """

    kind = traitlets.Enum(list(KIND_LABELS), "pretrain", help="The kind of task.")

    def __init__(
        self, options: RunOptions, functions: Callable[[], Mapping[str, object]] | None = None
    ) -> None:
        """Create the picker. ``functions`` returns the functions defined in the notebook's cells."""
        self.options = options
        self._functions = functions or list_notebook_functions
        self._plan: ss.Plan | None = None
        self._weights: Path | None = None
        self._chosen: Kind | None = None
        """The kind that the user chose while fine-tuning was available, or "own" at any time."""
        self._offering = False
        self.form: FormState | None = None
        """The form that has the task; None while the inputs here have it."""
        self._form_task: ss.Finetune | None = None
        """The last task of a form."""
        self.leave_form: Callable[[], None] = lambda: None
        """Called when the user chooses another kind of task while a form has it; set by the Studio."""
        # Fine-tuning is offered only once the model is a folder with weights (_offer_kinds).
        self.menu = controls.create_dropdown(options=[(KIND_LABELS["pretrain"], "pretrain")], tooltip="Task")
        self.text = controls.create_text_box("", TEXT_HINT, placeholder=SHIPPED_TEXT)
        self.code = controls.create_text_box(
            "", "Path of a script, or name of a function f(ctx) in this notebook"
        )
        self.code.placeholder = "train.py, or a function's name"
        self._text_row, self._code_row = Row("Text", self.text), Row("Code", self.code)
        self.note = controls.create_html("", "ss-hint")
        kind_row = Row("Task", self.menu)
        kind_row.add_class("ss-wide")
        rows = {"kind": kind_row, "text": self._text_row, "data": self._text_row, "code": self._code_row}
        # Fields of tasks without an input of their own: their errors are shown at the nearest one.
        others = {"weights": rows["kind"], "source": self._code_row, "arguments": self._code_row}
        super().__init__({**rows, **others}, self.note)
        self.menu.observe(self._choose_kind, "value")
        for control in (self.text, self.code):
            control.observe(self.read, "value")
        self._offer_kinds()
        self.read()

    def set_plan(self, plan: ss.Plan, weights: Path | None) -> None:
        """Set the plan, and the weights folder from which the model was read, if any."""
        is_other, self._plan, self._weights = weights != self._weights, plan, weights
        self._offer_kinds()
        if is_other:
            self.read()  # The answer includes the folder's name.
        self._show_data_note()
        self.show_usual_rate(plan)

    def set_form(self, form: FormState | None) -> None:
        """Let ``form`` have the task, or with None the inputs here. A new task makes fine-tuning the kind."""
        if form == self.form:
            return
        self.form = form
        if form is not None and form.task is not None and form.task != self._form_task:
            self._form_task, self._chosen = form.task, "finetune"
        self._offer_kinds()
        self.read()

    @property
    def mode(self) -> Kind:
        """The kind of task that would be launched."""
        return "finetune" if self.form is not None else self.kind

    def _show_data_note(self) -> None:
        """Show which weights and which text a run would train on."""
        if self.form is not None:
            self.note.value = ON_TAB
            return
        if self.kind == "own":
            note = "The code sets its own model, data, steps and learning rate."
        elif self._plan is not None and self.adapts_random_weights(self._plan):
            note = NO_WEIGHTS
        else:
            note = UNUSED_WEIGHTS if self.kind == "pretrain" and self._weights is not None else ""
        has_text = self.kind == "own" or self.text.value.strip()
        self.note.value = " ".join(filter(None, [note, "" if has_text else WITHOUT_TEXT]))

    def adapts_random_weights(self, plan: ss.Plan) -> bool:
        """Return whether adapters would be trained on random weights."""
        return self.mode == "pretrain" and plan.recipe.has_adapters

    def show_usual_rate(self, plan: ss.Plan, *, as_trial: bool = False) -> None:
        """Show the default learning rate of an empty input, which depends on the plan."""
        usual = limit_rate(ss.Pretrain.learning_rate, plan)
        if self.mode == "finetune" and not as_trial:
            usual = recommend_rate(plan, on_examples=False).value
        self.options.rate.placeholder = f"{usual:g}"

    @property
    def missing(self) -> str:
        """The input that the user still has to fill in; empty if none."""
        if self.form is not None:
            return self.form.message
        needs_code = self.kind == "own" and not self.code.value.strip()
        return "Enter a script or a function as Code first." if needs_code else ""

    @property
    def verb(self) -> str:
        """The main button's label: a verb and the subject."""
        verbs = {"pretrain": "Launch", "finetune": "Fine-tune", "own": "Run"}
        # Beside the button stands the model, and on the form's tab the data as well.
        return f"{verbs[self.mode]} {'' if self.form is not None else self.subject}".strip()

    @property
    def subject(self) -> str:
        """Short name of the folder or of the code."""
        if self.mode == "pretrain":
            return ""
        weights = self.weights_folder
        name = weights.name if weights is not None else "" if self.form else Path(self.code.value).name
        return name if len(name) <= 18 else f"{name[:17]}…"

    @property
    def weights_folder(self) -> Path | None:
        """The folder whose weights are fine-tuned; None for another kind of task."""
        if self.form is not None:
            return self.form.task.weights if self.form.task is not None else None
        return self._weights if self.kind == "finetune" else None

    def build_task(self, plan: ss.Plan, *, as_trial: bool = False) -> Callable[[Context], object]:
        """Return the task given by the inputs. Raises ``ValueError`` naming the field.

        ``as_trial``: ``plan`` is of a tiny model that replaces the user's and has no weights folder.
        """
        if self.form is not None and not as_trial:
            if self.form.task is None:
                raise ValueError(self.form.message)
            return replace_fields(self.form.task, {"profile": self.options.profile.value})
        if self.mode == "own":
            return self._read_user_code()
        text = self.text.value.strip()
        fields = self.options.read_fields()
        if text:
            fields["text"] = expand_home(text)
        # A trial trains a tiny model with random weights, because the folder's weights do not match it.
        if self.mode == "finetune" and not as_trial:
            if "text" in fields:
                fields["data"] = resolve_text("Finetune.data", cast("Path", fields.pop("text")))
            # Without a folder, Finetune raises the error that names the field.
            return replace_fields(ss.Finetune(weights=cast("Path", self._weights)), fields)
        if fields["learning_rate"] is None:
            fields["learning_rate"] = limit_rate(ss.Pretrain.learning_rate, plan)
        return replace_fields(ss.Pretrain(), fields)

    @property
    def boxes(self) -> dict[str, widgets.ValueWidget]:
        """See :class:`Picker`."""
        return {"text": self.text, "data": self.text, "code": self.code}

    def changes_of(self, error: FieldError) -> dict[str, object]:
        """Return the fix (see :class:`Picker`): the closest script or function for a misspelt one."""
        near = error.fix if error.field == CODE and error.fix != A_SCRIPT else ""
        return {CODE: near} if near else super().changes_of(error)

    def build_value(self) -> tuple[object, ...]:
        """Return the inputs as typed, which :meth:`build_task` validates, and the form."""
        return (self.kind, self.text.value, self.code.value, self.form)

    def read(self, change: object = None) -> None:
        """Read the inputs, and show the rows of the chosen kind."""
        super().read(change)
        self._text_row.show(self.mode != "own" and self.form is None)
        self._code_row.show(self.mode == "own")
        self.answer = f"{KIND_SUMMARIES[self.mode]} {self.subject}".strip()
        self._show_data_note()
        self.options.set_by = BY_FORM if self.form is not None else BY_CODE if self.kind == "own" else ""
        self.options.read()

    def _offer_kinds(self) -> None:
        can_finetune, has_form = self._weights is not None, self.form is not None
        default: Kind = "finetune" if can_finetune else "pretrain"
        wanted = self._chosen or default
        if wanted == "finetune" and not can_finetune:
            wanted = default
        kinds = [kind for kind in KIND_LABELS if kind != "finetune" or can_finetune or has_form]
        # Setting the options selects the first one, which must not count as the user's choice.
        self._offering = True
        try:
            options = [(KIND_LABELS[kind], kind) for kind in kinds]
            if list(self.menu.options) != options:
                self.menu.options = options
            # While the form has the task, the menu shows what would be launched.
            self.menu.value = "finetune" if has_form else wanted
        finally:
            self._offering = False
        if self.kind != wanted:
            self.kind = wanted
            self.read()

    def _choose_kind(self, change: KindChange) -> None:
        if self._offering or change["new"] is None:
            return
        # "Pretrain" chosen as the only option does not apply to a folder that is chosen later.
        could_finetune = self._weights is not None
        self._chosen = change["new"] if change["new"] == "own" or could_finetune else None
        self.kind = change["new"]
        if self.form is not None and self.kind != "finetune":
            self.form = None
            self._offer_kinds()
            self.leave_form()
        self.read()

    def _read_user_code(self) -> Callable[[Context], object]:
        name = self.code.value.strip()
        functions = {key: value for key, value in self._functions().items() if inspect.isfunction(value)}
        if name in functions:
            return functions[name] if _takes_context(functions[name]) else ss.Script(functions[name])
        # A leading underscore marks private names, IPython's own included.
        known = [key for key in functions if not key.startswith("_")]
        try:
            path = Path(name).expanduser()
            if name and path.is_file():
                return ss.Script(path)
            scripts = [str(path.with_name(one.name)) for one in path.parent.glob("*.py")]
        except (OSError, RuntimeError):
            scripts = []
        near = get_close_matches(name, [*known, *scripts], n=1)
        allowed = "the path of a script, or the name of a function f(ctx) in this notebook"
        fix = near[0] if near else A_SCRIPT
        problem = f"There is neither a script nor a function {name[:60]!r}"
        raise FieldError(CODE, name, allowed, fix, problem)


def _takes_context(function: FunctionType) -> bool:
    """Return whether ``function`` takes the run's context; a script's ``main()`` takes no argument."""
    try:
        inspect.signature(function).bind(None)
    except (TypeError, ValueError):
        return False
    return True


def _create_checkbox(label: str, tooltip: str, *, value: bool = False) -> widgets.Checkbox:
    return widgets.Checkbox(
        value=value, description=label, indent=False, layout=controls.share_filling_layout(), tooltip=tooltip
    )
