"""The view of a fine-tune from one click: model, data and method, then the run, then a chat."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from html import escape
from pathlib import Path

import ipywidgets as widgets
import traitlets

import shardscope as ss
from shardscope.core.number_format import format_count
from shardscope.memory.report import MemoryReport
from shardscope.planner.verdict import assess_plan
from shardscope.records.folder import FINAL
from shardscope.runs.launch.free_memory import TooLittleFreeError
from shardscope.training.tasks.choices import DEFAULT_EPOCHS
from shardscope_widgets.data.data_panel import DataPanel
from shardscope_widgets.data.preview_view import PreviewView
from shardscope_widgets.finetune.chat_view import ChatView
from shardscope_widgets.finetune.inputs import FinetuneInputs, FinetuneSettings
from shardscope_widgets.finetune.setup import Setup, build_first_plan, build_setup, find_weights
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.chart import Chart
from shardscope_widgets.kit.display_names import describe_devices
from shardscope_widgets.kit.fold import Fold, Folds
from shardscope_widgets.kit.latest_request import call_in_loop, find_running_loop
from shardscope_widgets.kit.notice import Notice
from shardscope_widgets.kit.sheet import Sheet
from shardscope_widgets.kit.view import View
from shardscope_widgets.memory.figure import create_memory_figure, draw_memory
from shardscope_widgets.memory.rows import ShownMemory
from shardscope_widgets.memory.table import write_caption
from shardscope_widgets.memory.verdict_line import render_verdict
from shardscope_widgets.pickers.recipe_choices import CHOICE_LABELS
from shardscope_widgets.run.run_html import format_seconds
from shardscope_widgets.run.view import RunView

NOTHING_CHOSEN = (
    "Choose a model and a data file. All other settings are recommended ones, with their reasons."
)
NO_MODEL, NO_DATA = "Choose a model.", "Choose a data file to train on."
NOT_HERE = "is not on this machine yet: download it with the button below its name."
READING, WRONG = "Reading the data…", "Correct the input marked in red first."
TIERS = ("predicted", "measured")
"""Rows of the memory chart."""
IS_ACTIVE = "A run is active: see below."


class FinetuneView(View):
    """Fine-tuning from one click: ``FinetuneView()``, or with the first inputs.

    ``weights`` is the folder of a Hugging Face model, "smollm2-135m-instruct", or a name on the Hub, which is
    downloaded at the press of a button; ``data`` a path or a data set's name. The plan is for this machine,
    and ``plan``, ``task`` and ``run`` are what the button launches and launched. A run continues when the
    view is closed.
    """

    plan = traitlets.Any(allow_none=True, default_value=None, help="The plan to launch; None without one.")
    run = traitlets.Any(allow_none=True, default_value=None, help="The run that the button started last.")

    def __init__(self, weights: str | Path = "", data: str | Path = "") -> None:
        self._machine = ss.Cluster.detect()
        self._setup: Setup | None = None
        self._measured: tuple[ss.Plan, MemoryReport] | None = None
        """The plan of the last run, with the memory that it took."""
        self._is_updating = False
        # Without an event loop, the data are read and reported in another thread.
        self._lock = threading.RLock()
        self._seq_len: tuple[object, int] | None = None
        """The data, and the sequence length that fits them."""
        self.headline = controls.create_html("", "ss-headline")
        self.notice = Notice()
        self.data_panel = DataPanel(on_length=self._use_length)
        self.inputs = FinetuneInputs(self._machine, self.data_panel)
        self.settings = FinetuneSettings()
        self.button = controls.create_button("Fine-tune", "ss-button", "ss-main-button", disabled=True)
        self.button.on_click(lambda _: self.launch())
        self.note = controls.create_html("", "ss-hint")
        self.preview = PreviewView(on_length=self._use_advised_length)
        self.folds = {
            "Data": Fold("What the model learns", self.preview),
            "Advanced": Fold("Advanced", self.settings),
        }
        self.folds["Advanced"].follow_picker(self.settings)
        self.figure: Chart | None = None
        # Filled with the first plan and the first run: a chart sends megabytes of front end.
        self._memory_place = widgets.VBox(layout=controls.share_layout())
        self._memory_place.add_class("ss-finetune-memory")
        self.caption = controls.create_html("", "ss-hint")
        self._chat_place = widgets.VBox(layout=controls.share_layout())
        self._run_place = widgets.VBox(layout=controls.share_layout())
        self.run_view: RunView | None = None
        self.chat: ChatView | None = None
        launch = widgets.HBox([self.button, self.note], layout=controls.share_layout())
        launch.add_class("ss-finetune-launch")
        top = widgets.Box([self.inputs, self._memory_place], layout=controls.share_layout())
        top.add_class("ss-finetune-top")
        super().__init__(
            [
                Sheet("pickers", "memory", "data", "run", "studio", "finetune"),
                self.headline,
                top,
                Folds(list(self.folds.values())),
                launch,
                self.notice,
                self._chat_place,
                self._run_place,
            ]
        )
        for name in ("ss-root", "ss-finetune"):
            self.add_class(name)
        self.data_panel.on_show = self._show_preview
        self.inputs.on_fetched = self.update
        self.inputs.observe(self.update, "value")
        self.settings.observe(self.update, "value")
        self.data_panel.observe(self.update, ["preview", "problem"])
        self.inputs.weights.value, self.inputs.data.value = str(weights), str(data)
        self.update()

    @property
    def task(self) -> ss.Finetune | None:
        """The task to launch; None without one."""
        return self._setup.task if self._setup is not None else None

    # ---- Inputs to plan

    def update(self, change: object = None) -> None:
        """Build plan and task from the inputs, or show what is missing or wrong."""
        with self._lock:
            if not self._is_updating and self.comm is not None:
                self._update()

    def _update(self) -> None:
        self._is_updating = True
        for picker in (self.inputs, self.settings):
            picker.clear_plan_errors()
        setup, message = None, ""
        try:
            setup, message = self._build_setup()
        except ValueError as error:
            self._show_error(error)
            message = WRONG
        except Exception as error:  # An exception raised in a handler would not be shown.
            self._show_error(ValueError(f"Internal error of Shardscope: {type(error).__name__}: {error}"))
            raise
        finally:
            self._is_updating = False
            self._show(setup, message)

    def _build_setup(self) -> tuple[Setup | None, str]:
        """Return the setup; None with the reason while an input is empty or being read."""
        weights_text, data, method = self.inputs.value
        if not weights_text:
            self.data_panel.set_task(None, None)
            return None, NO_MODEL if data else NOTHING_CHOSEN
        weights, settings = find_weights(weights_text), self.settings.value
        if weights is None:
            self.data_panel.set_task(None, None)
            return None, f"{weights_text} {NOT_HERE}"
        base = ss.Finetune(weights, data or None)
        if not data:
            self.data_panel.set_task(None, None)
            return None, NO_DATA
        source = (base.weights, base.data)
        seq_len = self._seq_len[1] if self._seq_len and self._seq_len[0] == source else None
        first = build_first_plan(base.weights, self._machine, method, settings, seq_len)
        if base.plain_text is not None:
            self.data_panel.set_task(None, None)
            return build_setup(base, first, settings, None), ""
        self.data_panel.set_task(base, first)
        if self.data_panel.problem is not None:
            raise self.data_panel.problem.with_traceback(None)
        preview = self.data_panel.preview
        if preview is None:
            return None, READING
        if self.data_panel.advice is not None and "seq_len" not in settings and seq_len is None:
            # The length that fits the data: they are read once more, cut to it.
            self._seq_len = (source, self.data_panel.advice.seq_len)
            first = build_first_plan(base.weights, self._machine, method, settings, self._seq_len[1])
            self.data_panel.set_task(base, first)
        return build_setup(base, first, settings, preview), ""

    def _show_error(self, error: ValueError) -> None:
        field = str(getattr(error, "field", "")).rpartition(".")[2]
        owner = self.settings if field in self.settings.rows else self.inputs
        owner.show_plan_error(error)

    def _use_length(self, seq_len: int) -> None:
        self.settings.set_fields({"seq_len": seq_len})

    def _use_advised_length(self) -> None:
        self.data_panel.use_length()

    # ---- Plan to screen

    def _show(self, setup: Setup | None, message: str) -> None:
        """Show ``setup``, or ``message``, which says why there is none."""
        self._setup = setup
        self.plan = None if setup is None else setup.plan
        preview = self.data_panel.preview
        if preview is not None:
            self.preview.show(preview, self.data_panel.advice)
        (self.folds["Data"].remove_class if preview is not None else self.folds["Data"].add_class)("ss-off")
        (self._memory_place.remove_class if setup is not None else self._memory_place.add_class)("ss-off")
        self._show_button()
        if setup is None:
            self.headline.value = f"<div class='ss-what' role='status'>{escape(message)}</div>"
            return
        self.headline.value = render_summary(setup, None if preview is None else preview.num_rows)
        self.settings.show_choices(setup.choices)
        if self.figure is None:
            self.figure = create_memory_figure(lambda _: None)
            self._memory_place.children = [self.figure, self.caption]
        reports = {"predicted": setup.report}
        if self._measured is not None and self._measured[0] == setup.plan:
            reports["measured"] = self._measured[1]
        shown = ShownMemory(setup.plan, reports, tiers=TIERS)
        draw_memory(self.figure, shown)
        self.caption.value = write_caption(shown)

    def _show_button(self) -> None:
        is_active = self.run is not None and self.run.status not in FINAL
        self.button.disabled = self._setup is None or is_active
        self.button.tooltip = IS_ACTIVE if is_active else "Train on this machine"
        self.note.value = "" if self._setup is None else escape(describe_validation(self._setup.task))

    def _show_preview(self) -> None:
        self.folds["Data"].head.expanded = True

    # ---- The run

    def launch(self, *, force: bool = False) -> None:
        """Launch the fine-tune; ``force`` launches although too little memory is free."""
        setup = self._setup
        if setup is None or self.button.disabled:
            return
        self.button.disabled = True  # A second click must not launch a second run.
        self.notice.show_message("")
        try:
            # ss.launch warns if memory is tight, which the headline shows.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                run = ss.launch(setup.plan, setup.task, force=force)
        except TooLittleFreeError as error:
            self._report_failure(str(error), {"Launch anyway": lambda: self.launch(force=True)})
        except ValueError as error:
            self._report_failure(WRONG, {})
            self._show_error(error)
        except Exception as error:  # An exception raised in a handler would not be shown.
            self._report_failure(str(error) or type(error).__name__, {})
        else:
            self._watch_run(run)

    def _report_failure(self, message: str, actions: dict[str, Callable[[], None]]) -> None:
        self._show_button()
        self.notice.show_message(message, actions, is_error=True)

    def _watch_run(self, run: ss.Run) -> None:
        self.run = run
        self._close_chat()
        loop = find_running_loop()
        if self.run_view is not None:
            self._run_place.children = []
            self.run_view.close()
        # The run's view calls this in its own thread; widgets are created in the kernel's.
        self.run_view = RunView(run, on_end=lambda run: call_in_loop(loop, lambda: self._run_ended(run)))
        self._run_place.children = [self.run_view]
        self._show_button()

    def _run_ended(self, run: ss.Run) -> None:
        if self.comm is None or self.run is not run:  # Closed, or another run started meanwhile.
            return
        measured = run.memory()
        if measured.tensor_bytes:
            self._measured = (run.plan, measured)
        self.update()
        if run.model is not None and self.chat is None:
            # The run's view below has the button that merges the adapters.
            self.chat = ChatView(run, with_merge=False)
            title = controls.create_html("<h2>Talk to it</h2>")
            self._chat_place.children = [title, self.chat]

    def _close_chat(self) -> None:
        parts, self._chat_place.children, self.chat = self._chat_place.children, [], None
        for part in parts:
            part.close()


def render_summary(setup: Setup, num_rows: int | None) -> str:
    """Return what the button will do, and the verdict about memory and time, as HTML."""
    plan, task = setup.plan, setup.task
    name = task.data.name if isinstance(task.data, Path) else task.data_name
    data = name if num_rows is None else f"{format_count(num_rows, 'row')} of {name}"
    epochs = task.num_epochs or (DEFAULT_EPOCHS if task.num_steps is None else None)
    passes = f" in {epochs:g} epoch{'s' * (epochs != 1)}" if epochs is not None else ""
    num_steps = setup.length.num_steps
    batch = format_count(plan.recipe.global_batch_size, "sequence")
    steps = "" if num_steps is None else f", {format_count(num_steps, 'step')} of {batch}"
    rank = f" of rank {plan.recipe.adapter_rank}" if plan.recipe.has_adapters else ""
    method = CHOICE_LABELS[plan.recipe.method] if plan.recipe.has_adapters else "full fine-tuning"
    what = (
        f"<b>{escape(task.weights.name)}</b> learns <b>{escape(data)}</b>{passes}{steps}, "
        f"with <b>{escape(method)}</b>{rank} on <b>{escape(describe_devices(plan.cluster))}</b>"
    )
    seconds = setup.length.seconds
    time = "" if seconds is None else f", about {format_seconds(seconds)}"
    verdict = render_verdict(plan, setup.report, assess_plan(plan, setup.report), time)
    return f"<div class='ss-what' role='status'>{what}</div>{verdict}"


def describe_validation(task: ss.Finetune) -> str:
    """Return how the run decides which weights it keeps."""
    if not isinstance(task.validation, float):
        return "Too few data to hold some out for validation: the last weights are kept."
    return (
        f"{task.validation:.0%} of the data are held out for validation. The weights with the lowest loss on "
        f"them are kept, and training ends after {task.early_stopping} validations without a lower one."
    )
