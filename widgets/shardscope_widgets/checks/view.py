"""The list of checks: ``plan.findings()``, each with a button that applies its suggested fix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape

import traitlets

import shardscope as ss
from shardscope.planner.checks import Finding
from shardscope_widgets.checks.findings import list_html, row_html, summary, title, worst_first
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.clickable import Clickable, IgnoredError
from shardscope_widgets.kit.sheet import Sheet
from shardscope_widgets.kit.view import View
from shardscope_widgets.pickers.base import typed_bytes

__all__ = ["ChecksView", "summary", "worst_first"]

LOOKING = "looking for one …"
NOTHING = "No findings: every check of this plan passed."


class ChecksView(View):
    """Findings, worst first, with severity, reason with its number, and suggested fix.

    A button applies a fix: ``on_apply`` receives the fixed plan, which :attr:`plan` holds; a fixed task goes
    to ``on_apply_task`` and :attr:`task`. A fix that takes seconds to find has its own search button. A
    finding that needs a node's host memory or NVMe capacity has an input for it.
    """

    plan = traitlets.Any(allow_none=True, default_value=None, help="The plan that was applied last.")
    task = traitlets.Any(allow_none=True, default_value=None, help="The task that was applied last.")

    def __init__(
        self,
        plan: ss.Plan | None = None,
        *,
        on_apply: Callable[[ss.Plan], None] | None = None,
        on_apply_task: Callable[[object], None] | None = None,
    ) -> None:
        self.findings: list[Finding] = []
        self._on_apply, self._on_apply_task = on_apply, on_apply_task
        self.list = Clickable(self._act, on_answer=self._answer)
        super().__init__([Sheet("checks"), self.list], layout=controls.share_layout())
        for name in ("ss-root", "ss-view", "ss-checks"):
            self.add_class(name)
        if plan is not None:
            self.show(plan.findings())

    def show(self, findings: Sequence[Finding]) -> None:
        """Draw ``findings``."""
        self.findings = worst_first(findings)
        acts = zip(_acts(self.findings), self.findings, strict=True)
        rows = [row_html(one, controls=_controls(one, act)) for act, one in acts]
        self.list.value = list_html(self.findings, rows) if rows else f"<p class='ss-hint'>{NOTHING}</p>"

    def freeze(self, frozen: bool) -> None:
        """Disable the buttons while an input is invalid."""
        self.list.frozen = frozen

    def _act(self, act: str) -> None:
        found = self._named(act)
        if _can_apply(found):
            self._apply(found)
        elif found.search is not None:
            self._search_fix(found)
        else:
            raise IgnoredError(act)

    def _answer(self, act: str, typed: str) -> None:
        """Apply the plan with the GiB of host memory or NVMe that the user typed."""
        question = self._named(act).question
        if question is None:
            raise IgnoredError(act)
        self._apply_plan(question.answer(typed_bytes(f"Cluster.{question.field}", typed)))

    def _named(self, act: str) -> Finding:
        """Return the finding with this name. The list may have changed since the click was sent."""
        found = dict(zip(_acts(self.findings), self.findings, strict=True)).get(act)
        if found is None:
            raise IgnoredError(act)
        return found

    def _apply(self, found: Finding) -> None:
        if found.plan is not None:
            self._apply_plan(found.plan)
        if found.task is not None:
            self.task = found.task
            if self._on_apply_task is not None:
                self._on_apply_task(found.task)

    def _search_fix(self, found: Finding) -> None:
        """Replace the finding by one with a fix, which the user reads before applying it."""
        waiting = replace(found, change=LOOKING, search=None)
        # The page shows this before the search starts.
        self._replace(found, waiting)
        self._replace(waiting, found.run_search())

    def _replace(self, old: Finding, new: Finding) -> None:
        self.show([new if one == old else one for one in self.findings])

    def _apply_plan(self, plan: ss.Plan) -> None:
        self.plan = plan
        if self._on_apply is not None:
            self._on_apply(plan)


def _can_apply(finding: Finding) -> bool:
    return finding.plan is not None or finding.task is not None


def _acts(findings: Sequence[Finding]) -> list[str]:
    """Return the action name of each finding, numbered if a plan and a task share a name."""
    names = [one.name for one in findings]
    before = [names[:place].count(name) for place, name in enumerate(names)]
    return [f"{name}:{again}" if again else name for name, again in zip(names, before, strict=True)]


def _controls(finding: Finding, act: str) -> str:
    """Return the button of a finding and its input if it has a question; "" if it has neither."""
    act = escape(act, quote=True)
    change = escape(finding.change, quote=True)
    box = ""
    if finding.question is not None:
        box = (
            "<label class='ss-answer'><input type='text' inputmode='decimal'"
            f" data-answer='{act}' aria-label='{change}, in GiB'> GiB</label>"
        )
    if finding.question is not None or _can_apply(finding):
        label, verb = f"Apply the fix: {change}", "Apply"
    elif finding.search is not None:
        label, verb = f"Find a fix for: {escape(title(finding), quote=True)}", "Find a fix"
    else:
        return box
    button = f"<button type='button' class='ss-act' data-act='{act}' aria-label='{label}'>{verb}</button>"
    return box + button
