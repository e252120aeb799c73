"""The inputs that profile the next steps of a live run: number of steps, ranks, and options."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

import ipywidgets as widgets

import shardscope as ss
from shardscope.core.errors import Value, refuse
from shardscope.records.folder import FINAL
from shardscope.runs.profiling_request import (
    COSTS,
    COSTS_SOURCE,
    LIVE,
    RecordingState,
    read_recording_state,
)
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.fold import Fold

TITLE = "Profile the next steps"
OPTIONS = {
    "shapes": "Sizes of every operator's inputs, for TFLOP/s",
    "stacks": "Python stacks, for the time by module",
    "memory": "Each allocation and free, for memory over time",
    "modules": "A named range for each layer's forward",
}
"""Tooltip of each option of ``run.profile``."""


class RecordingPanel(widgets.VBox):
    """The inputs and the button that call ``run.profile``, and the progress of the recording."""

    def __init__(self, on_open_trace: Callable[[ss.Run], None] | None) -> None:
        self._run: ss.Run | None = None
        self._on_open_trace = on_open_trace
        self._error = ""
        self.steps = controls.create_text_box(3, "Number of steps to record, 1 to 1,000", "64px")
        self.ranks = controls.create_text_box(
            "all", 'Ranks that record: "all", or numbers such as 0, 3', "96px"
        )
        self.options = {name: _create_option(name, tooltip) for name, tooltip in OPTIONS.items()}
        self.button = controls.create_button("", "ss-ghost", "ss-small", tooltip="Record, and train on")
        self.button.on_click(lambda _: self._start_recording())
        self.open_button = controls.create_button(
            "Open trace",
            "ss-ghost",
            "ss-small",
            tooltip="Show this recording",
            layout=widgets.Layout(display="none"),
        )
        self.open_button.on_click(lambda _: self._open_trace())
        self.words = controls.create_html("", "ss-hint")
        inputs = _create_row(
            controls.create_label("Steps"), self.steps, controls.create_label("Ranks"), self.ranks
        )
        cost = controls.create_html(f"<span>{escape(describe_cost())}</span>", "ss-hint")
        self.fold = Fold(
            TITLE,
            inputs,
            _create_row(*self.options.values()),
            cost,
            _create_row(self.button, self.open_button),
            self.words,
        )
        super().__init__([self.fold], layout=widgets.Layout(display="none"))
        self.add_class("ss-recording")
        self.steps.observe(lambda _: self._name_button(), "value")
        self._name_button()

    def start_run(self, run: ss.Run) -> None:
        """Offer to record ``run``."""
        self._run, self._error = run, ""
        self.layout.display = "none"

    def refresh(self, run: ss.Run, status: str) -> None:
        """Show the progress of the latest recording; nothing for an ended run, whose trace is a tab away."""
        if status in FINAL:
            self.layout.display = "none"
            return
        state = read_recording_state(run)
        self.layout.display = ""
        is_busy = state is not None and not state.is_finished
        self.button.disabled = is_busy or status not in LIVE
        is_written = state is not None and state.is_finished and state.num_written > 0
        self.open_button.layout.display = "" if is_written and self._on_open_trace is not None else "none"
        if is_busy:
            self._error = ""
        message = self._error or describe_state(state)
        self.fold.head.answer = "" if self._error else message
        kind = "ss-error" if self._error else ""
        html = f"<div class='{kind}' role='status'>{escape(message)}</div>" if message else ""
        if self.words.value != html:
            self.words.value = html

    def _name_button(self) -> None:
        steps = str(self.steps.value).strip()
        self.button.description = (
            "Profile the next step" if steps == "1" else f"Profile the next {steps} steps"
        )

    def _start_recording(self) -> None:
        run = self._run
        if run is None:
            return
        flags = {name: option.value for name, option in self.options.items()}
        try:
            steps = read_number("run.profile num_steps", self.steps.value)
            run.profile(steps, read_ranks(self.ranks.value), **flags)
            self._error = ""
        except (ValueError, OSError) as error:
            self._error = str(error)
        self.refresh(run, run.status)

    def _open_trace(self) -> None:
        if self._run is not None and self._on_open_trace is not None:
            self._on_open_trace(self._run)


def read_number(field: str, text: str) -> int:
    """Return the number in ``text``. Raises ``ValueError``."""
    try:
        return int(text)
    except ValueError:
        refuse(field, text, "a whole number", Value(3 if field.endswith("steps") else 0))


def read_ranks(text: str) -> list[int] | None:
    """Return the ranks in ``text``; None for all of them. Raises ``ValueError``."""
    if text.strip().lower() in ("", "all"):
        return None
    return [read_number("run.profile ranks", part) for part in text.split(",")]


def describe_state(state: RecordingState | None) -> str:
    """Return the progress of a recording as a sentence."""
    if state is None:
        return ""
    number, steps, ranks = state.request.number, state.request.num_steps, len(state.states)
    name = f"recording {number}" if number else "the recording of profile=True"
    if not state.is_finished:
        return f"{name}: in progress, {state.num_written} of {ranks} ranks written".capitalize()
    if state.num_written == ranks:
        length = f", {steps} step{'s' * (steps > 1)}" if number else ""
        return f"{name}{length}: written by {ranks} rank{'s' * (ranks > 1)}".capitalize()
    return f"{name}: written by {state.num_written} of {ranks} ranks; the log says why".capitalize()


def describe_cost() -> str:
    """Return a sentence about the cost of a recorded step, without options and with them."""
    costs = [cost for name, cost in COSTS.items() if name != "plain"]
    return (
        f"A recorded step takes about {COSTS['plain']:.2f} times the processor time of other steps, and "
        f"{min(costs):.2f} to {max(costs):.2f} times with one of these options. {COSTS_SOURCE}"
    )


def _create_option(name: str, tooltip: str) -> widgets.Checkbox:
    return widgets.Checkbox(
        value=False,
        description=name,
        indent=False,
        layout=controls.share_fixed_layout(),
        tooltip=tooltip,
    )


def _create_row(*children: widgets.Widget) -> widgets.HBox:
    row = widgets.HBox(list(children), layout=controls.share_layout())
    row.add_class("ss-recording-row")
    return row
