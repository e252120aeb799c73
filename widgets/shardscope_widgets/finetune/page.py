"""The Studio's Fine-tune tab: the form, then the run and a chat; the Studio's head has verdict and button."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ipywidgets as widgets

import shardscope as ss
from shardscope.training.tasks.choices import estimate_length
from shardscope_widgets.finetune.form import FinetuneForm, render_missing, render_summary
from shardscope_widgets.finetune.run_and_chat import RunAndChat
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.fold import Fold, Folds
from shardscope_widgets.kit.notice import Notice
from shardscope_widgets.pickers.task import FormState

OTHER_MODEL = "The plan has another model than this form."


class FinetunePage(widgets.VBox):
    """The page of the tab. ``on_change()`` is called when the form leads to something else.

    ``on_apply()`` applies the form's plan to the Studio, whose plan may have changed since. ``on_end(run)``
    is called when the run has ended.
    """

    def __init__(
        self,
        machine: ss.Cluster,
        *,
        on_change: Callable[[], None],
        on_apply: Callable[[], None],
        on_end: Callable[[ss.Run], None],
    ) -> None:
        self._on_apply = on_apply
        self.is_following = False
        """Whether the form is being set to the Studio's plan, and so must not change that plan."""
        self.summary = controls.create_html("", "ss-headline")
        self.notice = Notice()
        self._on_end = on_end
        self.outcome = RunAndChat(on_end=self._run_ended)
        self.form = FinetuneForm(machine, on_change=on_change, has_recipe=False)
        self.inputs = Fold("Model and data", self.form.inputs, self.form.note, is_open=True)
        self.inputs.follow_picker(self.form.inputs)
        folds = Folds([self.inputs, *self.form.folds.values()])
        super().__init__([self.summary, self.notice, folds, self.outcome], layout=controls.share_layout())
        self.add_class("ss-finetune")

    def close(self) -> None:
        """Close the page; a run continues."""
        self.form.close()
        super().close()

    @property
    def has_data(self) -> bool:
        """Return whether the user has chosen data."""
        return bool(self.form.inputs.value[1])

    def read_state(self, weights: Path | None) -> FormState:
        """Return the task; none while the Studio's model, from the folder ``weights``, is another one."""
        setup = self.form.setup
        if setup is None:
            return FormState(task=None, message=self.form.message)
        is_same = weights is not None and setup.task.weights.resolve() == weights.resolve()
        return FormState(task=setup.task) if is_same else FormState(task=None, message=OTHER_MODEL)

    def show(self, state: FormState, plan: ss.Plan) -> None:
        """Show what a launch of ``plan`` would do, or what is missing."""
        self.form.preview.set_plan(plan)
        is_other = state.message == OTHER_MODEL
        actions = {"Plan with this model": self._on_apply} if is_other else {}
        self.notice.show_message(OTHER_MODEL if is_other else "", actions)
        if state.task is None:
            self.summary.value = "" if is_other else render_missing(state.message)
            return
        preview = self.form.preview_of_data
        length = estimate_length(state.task, plan, preview)
        num_rows = None if preview is None else preview.num_rows
        self.summary.value = render_summary(plan, state.task, length, num_rows)
        self.is_following = True
        try:
            method = self.form.inputs.method
            if plan.recipe.method in dict(method.options).values():
                method.value = plan.recipe.method
        finally:
            self.is_following = False

    def watch(self, run: ss.Run) -> None:
        """Show ``run`` in place of the form, which can be opened again."""
        for fold in (self.inputs, *self.form.folds.values()):
            fold.head.expanded = False
        self.add_class("ss-is-training")
        self.outcome.watch(run)

    def _run_ended(self, run: ss.Run) -> None:
        self.remove_class("ss-is-training")
        self._on_end(run)
