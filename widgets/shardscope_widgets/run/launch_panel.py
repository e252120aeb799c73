"""The button that says what will happen: launch here, or rehearse on CPU ranks."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from html import escape

import ipywidgets as widgets

import shardscope as ss
from shardscope.frameworks.cpu_rehearsal import rehearsal_of
from shardscope.frameworks.registry import check_trained, why_not_trained
from shardscope.memory.overheads import TIGHT_PERCENT
from shardscope.memory.report import MemoryReport
from shardscope.memory.words import gib
from shardscope.planner.preflight.usual_rates import rate_near
from shardscope.planner.room import shortages
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.words import device_count
from shardscope_widgets.pickers.base import Row, typed_number, typed_rate
from shardscope_widgets.run.free_memory import FreePlaces, first_look

REHEARSAL_RANKS = 2
LAUNCHING = "Train this plan on this machine"
ENDS_WITH_KERNEL = "The run ends when this kernel does: on a restart, or when the notebook is shut down."
OUTLIVES = (
    "The run goes on when this kernel ends, until it is done or stopped. To see and stop it again: the Run "
    "tab of any Studio in this folder, or RunView(ss.runs()[-1])."
)
REHEARSING = "Train a tiny model of this family on CPU ranks of this machine, with the same framework"


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What pressing the button would start."""

    label: str
    plan: ss.Plan | None = None
    """None: nothing can be started, and ``note`` says why."""
    note: str = ""
    is_rehearsal: bool = False


class LaunchPanel(widgets.VBox):
    """Steps, learning rate, whether to record a trace, and the button. ``offer`` says for which plan."""

    def __init__(self, machine: ss.Cluster) -> None:
        self.machine = machine
        self.current = Offer(label="Launch")
        self._busy = False
        self._blocked = ""
        self._question: widgets.Button | None = None
        self._plan: ss.Plan | None = None
        """What would train: the plan on offer, or one that cannot start here."""
        self.steps = controls.text(40, "Optimizer steps", "64px")
        self.profile = widgets.Checkbox(
            value=True,
            description="trace",
            indent=False,
            layout=controls.filling(),
            tooltip="Record a trace: profile a few steady steps on every rank",
        )
        self.rate = controls.text(
            "", "Peak learning rate; empty: what models of this size and batch begin with", "64px"
        )
        self.outlive = widgets.Checkbox(
            value=False,
            description="goes on without this kernel",
            indent=False,
            layout=controls.filling(),
            tooltip="Whether the run outlives the kernel: a restart, or the end of the notebook",
        )
        self.outlive_words = controls.html("", "ss-hint")
        self.button = controls.button("Launch", "ss-button")
        self.note = controls.html("", "ss-hint")
        self.steps_row = Row("Steps, rate", self.steps, self.rate, self.profile)
        self.inputs = (self.steps, self.rate, self.profile)
        """What makes the task."""
        self.free = FreePlaces()
        super().__init__(
            [
                self.steps_row,
                Row("Kernel", self.outlive),
                self.outlive_words,
                self.button,
                self.note,
                self.free,
            ],
            layout=controls.layout(),
        )
        self.add_class("ss-launch")
        for control in self.inputs:
            control.observe(self._update, "value")
        self.outlive.observe(self._say_what_outliving_means, "value")
        self._say_what_outliving_means()
        first_look(self.free)

    def offer(self, plan: ss.Plan, report: MemoryReport) -> None:
        """Say on the button what ``plan`` would start here, once no run is under way."""
        self.current = offer_for(plan, self.machine, report)
        self.button.description = self.current.label
        self.button.tooltip = REHEARSING if self.current.is_rehearsal else LAUNCHING
        self._plan = self.current.plan or plan
        self.rate.placeholder = f"{rate_near(ss.Pretrain.learning_rate, self._plan):g}"
        self._update()

    @property
    def busy(self) -> bool:
        """Whether a run that was started here has not ended yet."""
        return self._busy

    @busy.setter
    def busy(self, value: bool) -> None:
        if self._busy and not value:
            self.free.ask()
        self._busy = value
        self._update()

    @property
    def blocked(self) -> str:
        """Why nothing may be started just now; empty when it may."""
        return self._blocked

    @blocked.setter
    def blocked(self, value: str) -> None:
        self._blocked = value
        self._update()

    def _update(self, change: object = None) -> None:
        """The button and the words under it, from what is offered and what stands against it."""
        is_wrong = self._show_errors()
        against = self.blocked or ("A run is under way: see the Run tab." if self.busy else "")
        self.button.disabled = bool(against) or is_wrong or self.current.plan is None
        self.say(against or self.current.note)

    def _show_errors(self) -> bool:
        """Whether an input makes no task; what is wrong stands under it."""
        self.steps_row.show_error("")
        if self._plan is None:
            return False
        try:
            self.task(self._plan)
        except ValueError as error:
            self.steps_row.show_error(str(error))
            return True
        return False

    def _say_what_outliving_means(self, change: object = None) -> None:
        self.outlive_words.value = escape(OUTLIVES if self.outlive.value else ENDS_WITH_KERNEL)

    def say(self, words: str, is_error: bool = False) -> None:
        """Words under the button."""
        self._close_question()
        role = " class='ss-error' role='alert'" if is_error else ""
        self.note.value = f"<span{role}>{escape(words)}</span>"

    def ask_whether_to_go_on(self, words: str, go_on: Callable[[], None]) -> None:
        """An error, and until something else is said a button that launches in spite of it."""
        self.say(words, is_error=True)
        anyway = controls.button("Launch all the same", "ss-button", "ss-ghost")
        anyway.on_click(lambda _: go_on())
        self._question = anyway
        below = self.children.index(self.note) + 1
        self.children = (*self.children[:below], anyway, *self.children[below:])
        self.free.ask()

    def _close_question(self) -> None:
        question, self._question = self._question, None
        if question is not None:
            self.children = [child for child in self.children if child is not question]
            question.close()

    def task(self, plan: ss.Plan) -> ss.Pretrain:
        """The task that the inputs describe, of ``plan``. Raises ``ValueError``."""
        typed = self.rate.value.strip()
        return ss.Pretrain(
            num_steps=typed_number(self.steps.value),
            profile=self.profile.value,
            learning_rate=typed_rate(typed) if typed else rate_near(ss.Pretrain.learning_rate, plan),
        )

    def take(self, task: ss.Pretrain, plan: ss.Plan) -> None:
        """Set the inputs to what makes ``task`` of ``plan``."""
        self.steps.value = str(task.num_steps)
        self.profile.value = task.profile
        # What every size begins with stays so: a rehearsal's model is another.
        usual = rate_near(ss.Pretrain.learning_rate, plan)
        self.rate.value = "" if task.learning_rate == usual else f"{task.learning_rate:g}"


def offer_for(plan: ss.Plan, machine: ss.Cluster, report: MemoryReport) -> Offer:
    """Launch where the plan's GPUs are here; else rehearse on CPU ranks; else say what is missing."""
    here = (
        plan.cluster.num_nodes == 1
        and plan.cluster.gpu.name == machine.gpu.name
        and (plan.cluster.gpus_per_node <= machine.gpus_per_node or plan.cluster.gpu.name == "cpu")
    )
    label = f"Launch on {device_count(plan.cluster)}" if here else f"Rehearse on {REHEARSAL_RANKS} CPU ranks"
    missing = [
        module for module in ("torch", "accelerate", "transformers") if not importlib.util.find_spec(module)
    ]
    if missing:
        return Offer(
            label=label, note=f'Training needs {", ".join(missing)}: pip install "shardscope[train]"'
        )
    too_large = _cannot_fit(plan, report) if here else ""
    if here and not too_large:
        refusal = why_not_trained(plan)
        return (
            Offer(label=label, note=refusal)
            if refusal
            else Offer(label=label, plan=plan, note=_warning(report))
        )
    label = f"Rehearse on {REHEARSAL_RANKS} CPU ranks"
    try:
        rehearsal = rehearsal_of(plan, REHEARSAL_RANKS)
        check_trained(rehearsal.plan)
    except ValueError as error:
        return Offer(label=label, note=str(error))
    return Offer(
        label=label,
        plan=rehearsal.plan,
        is_rehearsal=True,
        note=too_large
        + "A rehearsal: the same framework on this machine, with "
        + ", ".join(rehearsal.differences)
        + ".",
    )


def _cannot_fit(plan: ss.Plan, report: MemoryReport) -> str:
    """What is too little in any case. A prediction is a band: of the card, only its least counts."""
    if report.low_bytes > report.usable_bytes:
        have, least = gib(report.usable_bytes), gib(report.low_bytes)
        return f"This machine has {have} GiB, and at least {least} are needed. "
    for place in shortages(plan, report):
        if place.name != "GPU memory":
            return (
                f"A node has {gib(place.room_bytes or 0)} GiB of {place.name}, and "
                f"{gib(place.needed_bytes)} are needed. "
            )
    return ""


def _warning(report: MemoryReport) -> str:
    if report.is_tight:
        return (
            f"It may run out of memory: it needs {gib(report.peak_bytes)} of {gib(report.usable_bytes)} "
            f"usable GiB, and over {TIGHT_PERCENT} % some runs do."
        )
    if report.fits:
        return ""
    return (
        f"It may run out of memory: likely {gib(report.low_bytes)} to {gib(report.high_bytes)} GiB, and "
        f"{gib(report.usable_bytes)} are usable."
    )
