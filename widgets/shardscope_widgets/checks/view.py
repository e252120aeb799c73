"""The list of checks: ``plan.findings()``, each with a button that applies its suggested fix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape

import traitlets

import shardscope as ss
from shardscope.planner.checks import Finding
from shardscope_widgets.checks.findings import (
    render_finding,
    render_list,
    sort_worst_first,
    write_change,
    write_title,
)
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.clickable import Clickable, IgnoredError
from shardscope_widgets.kit.sheet import Sheet
from shardscope_widgets.kit.view import View
from shardscope_widgets.pickers.base import parse_bytes

SEARCHING = "searching …"
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
        self.list = Clickable(self._handle_action, on_answer=self._apply_answer)
        super().__init__([Sheet("checks"), self.list], layout=controls.share_layout())
        controls.add_classes(self, "ss-root", "ss-view", "ss-checks")
        if plan is not None:
            self.show(plan.findings())

    def show(self, findings: Sequence[Finding]) -> None:
        """Draw ``findings``."""
        self.findings = sort_worst_first(findings)
        acts = zip(_name_actions(self.findings), self.findings, strict=True)
        rows = [render_finding(one, controls=_render_controls(one, act)) for act, one in acts]
        self.list.value = render_list(self.findings, rows) if rows else f"<p class='ss-hint'>{NOTHING}</p>"

    def freeze(self, frozen: bool) -> None:
        """Disable the buttons while an input is invalid."""
        self.list.frozen = frozen

    def _handle_action(self, act: str) -> None:
        finding = self._find_finding(act)
        if _can_apply(finding):
            self._apply_finding(finding)
        elif finding.search is not None:
            self._search_fix(finding)
        else:
            raise IgnoredError(act)

    def _apply_answer(self, act: str, typed: str) -> None:
        """Apply the plan with the GiB of host memory or NVMe that the user typed."""
        question = self._find_finding(act).question
        if question is None:
            raise IgnoredError(act)
        self._apply_plan(question.answer(parse_bytes(f"Cluster.{question.field}", typed)))

    def _find_finding(self, act: str) -> Finding:
        """Return the finding with this name. The list may have changed since the click was sent."""
        finding = dict(zip(_name_actions(self.findings), self.findings, strict=True)).get(act)
        if finding is None:
            raise IgnoredError(act)
        return finding

    def _apply_finding(self, finding: Finding) -> None:
        if finding.plan is not None:
            self._apply_plan(finding.plan)
        if finding.task is not None:
            self.task = finding.task
            if self._on_apply_task is not None:
                self._on_apply_task(finding.task)

    def _search_fix(self, finding: Finding) -> None:
        """Replace the finding by one with a fix, which the user reads before applying it."""
        waiting = replace(finding, change=SEARCHING, search=None)
        # The page shows this before the search starts.
        self._replace_finding(finding, waiting)
        self._replace_finding(waiting, finding.run_search())

    def _replace_finding(self, old: Finding, new: Finding) -> None:
        self.show([new if one == old else one for one in self.findings])

    def _apply_plan(self, plan: ss.Plan) -> None:
        self.plan = plan
        if self._on_apply is not None:
            self._on_apply(plan)


def _can_apply(finding: Finding) -> bool:
    return finding.plan is not None or finding.task is not None


def _name_actions(findings: Sequence[Finding]) -> list[str]:
    """Return the action name of each finding, numbered if a plan and a task share a name."""
    names = [one.name for one in findings]
    before = [names[:place].count(name) for place, name in enumerate(names)]
    return [f"{name}:{again}" if again else name for name, again in zip(names, before, strict=True)]


def _render_controls(finding: Finding, act: str) -> str:
    """Return the button of a finding and its input if it has a question; "" if it has neither."""
    act = escape(act, quote=True)
    change = escape(write_change(finding), quote=True)
    box = ""
    if finding.question is not None:
        box = (
            "<label class='ss-answer'><input type='text' inputmode='decimal'"
            f" data-answer='{act}' aria-label='{change}, in GiB'> GiB</label>"
        )
    if finding.question is not None or _can_apply(finding):
        label, verb = f"Apply the fix: {change}", "Apply"
    elif finding.search is not None:
        label, verb = f"Find a fix for: {escape(write_title(finding), quote=True)}", "Find a fix"
    else:
        return box
    button = f"<button type='button' class='ss-act' data-act='{act}' aria-label='{label}'>{verb}</button>"
    return box + button
