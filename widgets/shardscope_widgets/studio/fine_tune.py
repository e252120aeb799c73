"""The Studio's side of the Fine-tune tab: the plan of its form, and when its task is the one to launch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import shardscope as ss
from shardscope_widgets.finetune import FinetunePage
from shardscope_widgets.finetune.setup import Setup
from shardscope_widgets.kit.notice import Notice
from shardscope_widgets.kit.tabs import Tabs
from shardscope_widgets.pickers.task import FormState
from shardscope_widgets.studio.inputs import StudioInputs

FINE_TUNE = "Fine-tune"
REPLACED = "The plan is now the Fine-tune form's."
KEPT_SETTINGS = "GPUs and training settings are still those of the fine-tune"


class FineTuneTab:
    """Connects the form with the Studio's inputs.

    ``apply(plan, weights)`` sets the inputs to a plan; ``current()`` returns the plan that they lead to.
    """

    def __init__(
        self,
        inputs: StudioInputs,
        tabs: Tabs,
        notice: Notice,
        *,
        apply: Callable[[ss.Plan, Path | None], None],
        current: Callable[[], ss.Plan],
    ) -> None:
        self._inputs, self._tabs, self._notice = inputs, tabs, notice
        self._apply, self._current = apply, current
        self.page: FinetunePage | None = None
        """None until the tab is first shown."""
        self._planned: ss.Plan | None = None
        """The plan of the form that was applied last."""
        self._in_inputs: ss.Plan | None = None
        """The same plan as the inputs have it."""
        self._replaced: tuple[ss.Plan, Path | None] | None = None
        """The plan that the form has replaced, and the folder of its model."""

    def create_page(self, on_change: Callable[[], None], on_end: Callable[[ss.Run], None]) -> FinetunePage:
        """Return a new page, which begins with the plan's model."""

        def apply_again() -> None:
            self._planned = None
            on_change()

        page = FinetunePage(
            self._inputs.cluster.machine, on_change=on_change, on_apply=apply_again, on_end=on_end
        )
        page.form.inputs.weights.value = str(self._inputs.architecture.weights_folder or "")
        self.page = page
        return page

    def use_form(self) -> None:
        """Use the form's plan, and its task while the fine-tune form is active."""
        page = self.page
        if page is None:
            return
        setup = page.form.setup
        if setup is not None and setup.plan != self._planned:
            self._planned = setup.plan
            if not page.is_following:
                self._replace_plan(setup)
        has_turn = self._is_shown or (self._inputs.task.kind == "finetune" and page.has_data)
        self._inputs.task.set_form(self._read_state(page) if has_turn else None)

    def _replace_plan(self, setup: Setup) -> None:
        """Apply the form's plan, and offer to restore the one before it."""
        # While the form is edited, Undo restores the plan before its first change.
        plan = self._current()
        if self._replaced is None or plan != self._in_inputs:
            self._replaced = plan, self._inputs.architecture.weights_folder
        earlier, weights = self._replaced
        self._in_inputs = None
        self._apply(setup.plan, setup.task.weights)
        self._in_inputs = self._current()
        if self._in_inputs != earlier:
            self._notice.show_message(REPLACED, {"Undo": lambda: self._apply(earlier, weights)})

    def name_settings(self, before: object) -> None:
        """Name the settings of a fine-tune that stay in the plan of another model, and offer those before it.

        ``before`` is the plan before the current one. The settings follow from the form's data and the
        machine, and the user has set none of them at the left. They are not removed by themselves: the user
        may compare models for one fine-tune.
        """
        if self._replaced is None or self._in_inputs is None or not isinstance(before, ss.Plan):
            return
        plan, earlier, formed = self._current(), self._replaced[0], self._in_inputs
        is_other = plan.architecture not in (before.architecture, formed.architecture)
        if not is_other or plan.recipe != formed.recipe or plan.recipe == earlier.recipe:
            return
        actions = {}
        with contextlib.suppress(ValueError):  # The model may not fit the degrees of then.
            own = replace(earlier, architecture=plan.architecture)
            actions = {"Use those before": lambda: self._apply(own, None)}
        self._notice.show_message(f"{KEPT_SETTINGS}: {self._inputs.recipe.answer}.", actions)

    def show_plan(self, page: FinetunePage, plan: ss.Plan) -> None:
        """Show on ``page`` what a launch of ``plan`` would do, or what is missing."""
        page.show(self._read_state(page), plan)

    def leave(self) -> None:
        """Show another tab: the form has the task while its own is shown."""
        if self._is_shown:
            self._tabs.value = "Memory"

    @property
    def lacks_task(self) -> bool:
        """Return whether the tab is shown and its form leads to no plan."""
        page = self.page
        if not self._is_shown or page is None or page.form.setup is not None:
            return False
        # While other data are read, the last plan stays.
        return self._planned is None or not page.form.data_panel.is_reading

    @property
    def _is_shown(self) -> bool:
        return bool(self._tabs.value == FINE_TUNE)

    def _read_state(self, page: FinetunePage) -> FormState:
        return page.read_state(self._inputs.architecture.weights_folder)
