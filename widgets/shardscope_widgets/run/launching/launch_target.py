"""Choice of the launch target: this machine or the queue of a scheduler, with the options of its job."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import ipywidgets as widgets
import traitlets

from shardscope_widgets.kit import controls
from shardscope_widgets.pickers.base import Picker, Row
from shardscope_widgets.pickers.schedulers import Queue, Scheduler

HERE = ""
"""Value of the menu for this machine."""
OPTIONS_TOOLTIP = "Options of the job: time limit, account and others, in the section Run"


class JobOptions(Picker):
    """Options of the jobs of one scheduler. The value is what ``launch(on=)`` takes."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._queue_name = ""
        self._inputs = {
            option.field: controls.create_text_area(option.tooltip, placeholder=option.placeholder)
            if option.is_list
            else controls.create_text_box("", option.tooltip, placeholder=option.placeholder)
            for option in scheduler.options
        }
        rows = {option.field: Row(option.label, self._inputs[option.field]) for option in scheduler.options}
        # A picker has a row at least, at which errors without a named field are shown.
        super().__init__(rows or {"": Row("")})
        for box in self._inputs.values():
            box.observe(self.read, "value")

    def set_queue(self, name: str) -> None:
        """Set the queue that the job is for, such as a partition."""
        self._queue_name = name
        self.read()

    @property
    def boxes(self) -> dict[str, widgets.ValueWidget]:
        """See :class:`Picker`."""
        return dict(self._inputs)

    @property
    def description(self) -> str:
        """The options that are set, in one line."""
        typed = [
            option.label.lower() if option.is_list else f"{option.label.lower()} {text}"
            for option in self._scheduler.options
            if (text := self._inputs[option.field].value.strip())
        ]
        return ", ".join(typed) or f"defaults of {self._scheduler.name}"

    def build_value(self) -> object:
        """Return the target. Raises ``ValueError`` naming the field."""
        fields: dict[str, object] = {}
        for option in self._scheduler.options:
            text = self._inputs[option.field].value.strip()
            if text:
                lines = [line for line in text.splitlines() if line.strip()]
                fields[option.field] = lines if option.is_list else text
        return self._scheduler.build_target(self._queue_name, fields)


class LaunchTarget(traitlets.HasTraits):
    """The choice of a target. ``head`` stands below the main button, ``options`` in the section Run.

    Both are hidden until :meth:`offer_queues` is called with a queue. ``on_change()`` is called after every
    change; ``on_options()`` when the user asks for the options.
    """

    is_wrong = traitlets.Bool(False, help="Whether an option of the chosen job has an error message.")

    def __init__(self, on_change: Callable[[], None], on_options: Callable[[], None]) -> None:
        super().__init__()
        self._on_change = on_change
        self._queues: dict[str, Queue] = {}
        self._jobs: dict[str, JobOptions] = {}
        """By scheduler, created when it is first chosen: a reloaded page has less to load."""
        self._is_offering = False
        self.choice = controls.create_dropdown(
            options=[("this machine", HERE)], tooltip="Where the run is launched"
        )
        self.choice.observe(self._choose, "value")
        self.link = controls.create_button("Options", "ss-link", "ss-off", tooltip=OPTIONS_TOOLTIP)
        self.link.on_click(lambda _: on_options())
        self.head = widgets.HBox(
            [controls.create_label("on"), self.choice, self.link], layout=controls.share_layout()
        )
        self.options = widgets.VBox(layout=controls.share_layout())
        controls.add_classes(self.head, "ss-launch-target", "ss-off")

    @property
    def queue(self) -> Queue | None:
        """The chosen queue; None for this machine."""
        return self._queues.get(self.choice.value)

    @property
    def job(self) -> JobOptions | None:
        """The options of the job; None for this machine."""
        queue = self.queue
        return None if queue is None else self._jobs[queue.scheduler.name]

    @property
    def value(self) -> object:
        """Target for ``launch(on=)``; None for this machine."""
        return None if self.job is None else self.job.value

    def offer_queues(self, queues: Sequence[Queue]) -> None:
        """Offer ``queues`` besides this machine. The chosen one stays, if it is still there."""
        before = self.choice.value
        self._queues = {queue.label: queue for queue in queues}
        options = [("this machine", HERE), *((label, label) for label in self._queues)]
        self._is_offering = True
        try:
            if list(self.choice.options) != options:
                # Setting the options selects the first one.
                self.choice.options = options
            self.choice.value = before if before in self._queues else HERE
        finally:
            self._is_offering = False
        controls.show_if(self.head, queues)
        self._choose()

    def choose(self, label: str) -> None:
        """Choose the queue ``label``, or this machine for any other text."""
        self.choice.value = label if label in self._queues else HERE

    def _choose(self, change: object = None) -> None:
        if self._is_offering:
            return
        queue = self.queue
        if queue is not None:
            name = queue.scheduler.name
            if name not in self._jobs:
                self._jobs[name] = JobOptions(queue.scheduler)
                for trait in ("value", "is_wrong"):
                    self._jobs[name].observe(self._read_job, trait)
            self._jobs[name].set_queue(queue.name)
        self.options.children = [] if self.job is None else [self.job]
        has_options = queue is not None and bool(queue.scheduler.options)
        controls.show_if(self.link, has_options)
        self.choice.tooltip = (
            "Where the run is launched" if queue is None else f"{queue.label} has {queue.description}"
        )
        self._read_job()

    def _read_job(self, change: object = None) -> None:
        self.is_wrong = self.job is not None and self.job.is_wrong
        self._on_change()
