"""The Studio's side of the Fine-tune tab: the plan of its form, and when its task is the one to launch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import shardscope as ss
from shardscope_widgets.finetune import FinetunePage
from shardscope_widgets.kit.tabs import Tabs
from shardscope_widgets.pickers.task import FormState
from shardscope_widgets.studio.inputs import StudioInputs

FINE_TUNE = "Fine-tune"


class FineTuneTab:
    """Connects the form with the Studio's inputs; ``apply(plan, weights)`` sets them to the form's plan."""

    def __init__(
        self, inputs: StudioInputs, tabs: Tabs, apply: Callable[[ss.Plan, Path | None], None]
    ) -> None:
        self._inputs, self._tabs, self._apply = inputs, tabs, apply
        self.page: FinetunePage | None = None
        """None until the tab is first shown."""
        self._planned: ss.Plan | None = None
        """The plan of the form that was applied last."""

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
        """Plan what the form leads to, and launch its task while it is the form's turn."""
        page = self.page
        if page is None:
            return
        setup = page.form.setup
        if setup is not None and setup.plan != self._planned:
            self._planned = setup.plan
            if not page.is_following:
                self._apply(setup.plan, setup.task.weights)
        has_turn = self._is_shown or (self._inputs.task.kind == "finetune" and page.has_data)
        self._inputs.task.set_form(self._read_state(page) if has_turn else None)

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
