"""Changes of the Studio's plan by a file, a tab's button, a fit or a trace, each with "Undo"."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import ipywidgets as widgets

import shardscope as ss
from shardscope.planner.advice.descriptions import name_plan
from shardscope.planner.differences import find_differences
from shardscope.planner.repairs.make_it_fit import Fit
from shardscope_widgets.kit.notice import Notice
from shardscope_widgets.memory.fit_search import Result
from shardscope_widgets.memory.repairs import describe_no_fit, name_changes, name_difference
from shardscope_widgets.studio.head import write_fit_question
from shardscope_widgets.studio.inputs import StudioInputs

_TASK_LABELS = {
    "num_steps": "steps",
    "learning_rate": "learning rate",
    "warmup": "warm-up",
    "profile": "record a trace",
}
"""Field of a task -> name of its input in a notice, where that is not the field's own name."""


NO_INPUT = "No input of the Studio sets this: launch the run from Python with the suggested value."


class PlanChanges:
    """Applies plans by ``apply(plan)``, and shows in ``notice`` what has changed."""

    def __init__(self, inputs: StudioInputs, notice: Notice, apply: Callable[[ss.Plan], None]) -> None:
        self._inputs, self._notice, self._apply = inputs, notice, apply

    def open_plan(self, before: ss.Plan, plan: ss.Plan) -> None:
        """Apply ``plan``, which was read from a file."""
        undo = self._apply_undoably(before, plan)
        if self._inputs.is_wrong:
            message = "Plan opened, but one of its values is invalid: correct the input marked in red."
            self._notice.show_message(message, is_error=True)
        else:
            self._notice.show_message("Plan opened.", undo)

    def apply_listed(self, before: ss.Plan, plan: ss.Plan) -> None:
        """Apply ``plan``, which was chosen in the Plans tab."""
        undo = self._apply_undoably(before, plan)
        if plan != before and not self._inputs.is_wrong:
            name = name_plan(plan, before.recipe)
            # Such as other kernels, which names of plans leave out.
            is_named = name != name_plan(before, before.recipe)
            message = f"Applied {name}." if is_named else _describe_changes(before, plan, f"Applied {name}.")
            self._notice.show_message(message, undo)

    def apply_suggested(self, before: ss.Plan, plan: ss.Plan) -> None:
        """Apply ``plan``, a change of ``before`` that the Memory tab or a finding suggests."""
        undo = self._apply_undoably(before, plan)
        if plan == before or self._inputs.is_wrong:
            return
        message = _describe_changes(before, plan, "Applied the fix.")
        self._notice.show_message(message, undo)

    def apply_task(self, boxes: Mapping[str, widgets.ValueWidget], set_inputs: Callable[[], None]) -> None:
        """Set ``boxes``, the inputs of the task by field, with ``set_inputs`` to what a finding suggests."""
        before = {field: box.value for field, box in boxes.items()}
        set_inputs()
        after = {field: box.value for field, box in boxes.items() if box.value != before[field]}

        def undo() -> None:
            for field, value in after.items():
                if boxes[field].value == value:  # Not typed over since then.
                    boxes[field].value = before[field]

        changes = [
            f"{_TASK_LABELS.get(field, field)} {_show_input(before[field])} → {_show_input(value)}"
            for field, value in after.items()
        ]
        if changes:
            self._notice.show_message(f"Applied: {', '.join(changes)}.", {"Undo": undo})
        else:  # Such as another seed.
            self._notice.show_message(NO_INPUT, is_error=True)

    def apply_traced(self, before: ss.Plan, plan: ss.Plan) -> None:
        """Apply the change of a traced run's plan that a sentence of its trace suggests."""
        undo = self._apply_undoably(before, plan)
        self._notice.show_message("Applied the changed plan of the run.", undo)

    def offer_fit(self, before: ss.Plan, fit: Result) -> None:
        """Apply the fit for ``before``; ask first if it changes more than degrees and recomputation."""
        if isinstance(fit, Exception):
            message = f"The search for a plan that fits failed: {type(fit).__name__}: {fit}"
            self._notice.show_message(message, is_error=True)
            return
        if fit is None:
            self._notice.show_message(describe_no_fit(before), is_error=True)
            return
        if self._inputs.is_wrong:  # An input was changed during the search.
            return
        question = write_fit_question(before, fit)
        if question is None:
            self._apply_fit(before, fit)
        else:
            message, label = question
            self._notice.show_message(message, {label: lambda: self._apply_fit(before, fit)})

    def _apply_fit(self, before: ss.Plan, fit: Fit) -> None:
        undo = self._apply_undoably(before, fit.plan)
        self._notice.show_message(f"Made it fit: {name_changes(before, fit)}.", undo)

    def _apply_undoably(self, before: ss.Plan, plan: ss.Plan) -> dict[str, Callable[[], None]]:
        """Apply ``plan``. Return the action that restores ``before``, and what ``plan``'s framework had."""
        restore = self._inputs.layout.remember_framework(plan.layout.framework)
        self._apply(plan)

        def undo() -> None:
            self._apply(before)
            restore()

        return {"Undo": undo}


def _describe_changes(before: ss.Plan, plan: ss.Plan, unnamed: str) -> str:
    """Return ``Applied: recompute none → full.``; ``unnamed`` for changes that have no name."""
    # The memory of a node is no part of the cluster's text.
    changes = [name_difference(one) for one in find_differences(before, plan) if one.before != one.after]
    return f"Applied: {', '.join(changes)}." if changes else unnamed


def _show_input(value: object) -> str:
    """Return the value of an input of the task; an empty one takes the default."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value) or "default"
