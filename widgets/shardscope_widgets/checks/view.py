"""What of a plan runs, but badly: ``plan.findings()`` as a list, with the button that mends each."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from html import escape

import traitlets

import shardscope as ss
from shardscope.frameworks.registry import frameworks
from shardscope.planner.preflight import SEVERITIES, Finding
from shardscope_widgets.kit import controls
from shardscope_widgets.kit.clickable import Clickable, IgnoredError
from shardscope_widgets.kit.sheet import Sheet
from shardscope_widgets.kit.view import View
from shardscope_widgets.pickers.base import typed_bytes

SIGNS = {"danger": "■", "warning": "▲", "hint": "●"}
"""A shape for each severity beside its word: its colour says nothing that these do not."""

_SPELLED = {
    "gpu": "GPU",
    "cpu": "CPU",
    "nvme": "NVMe",
    "nccl": "NCCL",
    "fsdp1": "FSDP1",
    **{name: framework.title for name, framework in frameworks.items()},
}
"""Words of a finding's name that are no plain ones."""

LOOKING = "Looking for one …"
NOTHING = "Nothing to mend: no check has anything against this plan."


class ChecksView(View):
    """Findings, the worst first: how bad, why with the number behind it, and what mends it.

    A button applies the mended plan: ``on_apply`` gets it, and :attr:`plan` has it; a mended task goes to
    ``on_apply_task`` and :attr:`task`. A script's mended text goes to ``on_apply_source``, and nothing else
    of its finding anywhere; without one, it has no button. What no click can mend may be noted: then
    ``on_note`` gets the finding. What takes long to find is looked for by a click of its own. Where a finding
    asks how much of something a node has, the plan with the answer is applied.
    """

    plan = traitlets.Any(allow_none=True, default_value=None, help="The plan that was applied last.")
    task = traitlets.Any(allow_none=True, default_value=None, help="The task that was applied last.")

    def __init__(
        self,
        plan: ss.Plan | None = None,
        *,
        on_apply: Callable[[ss.Plan], None] | None = None,
        on_apply_task: Callable[[object], None] | None = None,
        on_apply_source: Callable[[str], None] | None = None,
        on_note: Callable[[Finding], None] | None = None,
        nothing: str = NOTHING,
    ) -> None:
        self.findings: list[Finding] = []
        self._on_apply, self._on_apply_task = on_apply, on_apply_task
        self._on_apply_source, self._on_note = on_apply_source, on_note
        self._notable: Container[Finding] = ()
        self.nothing = nothing
        """What is said where nothing is found."""
        self.list = Clickable(self._act, on_answer=self._answer)
        super().__init__([Sheet("checks"), self.list], layout=controls.layout())
        for name in ("ss-root", "ss-view", "ss-checks"):
            self.add_class(name)
        if plan is not None:
            self.show(plan.findings())

    def show(self, findings: Sequence[Finding], notable: Container[Finding] = ()) -> None:
        """Draw findings, of which those in ``notable`` can be noted where no click mends them."""
        self.findings, self._notable = worst_first(findings), notable
        acts = zip(acts_of(self.findings), self.findings, strict=True)
        rows = [_row(one, act, self._verb(one)) for act, one in acts]
        self.list.value = in_html(self.findings, rows) if rows else f"<p class='ss-hint'>{self.nothing}</p>"

    def freeze(self, frozen: bool) -> None:
        """Let nothing be pressed: what is shown is no answer to what is asked now."""
        self.list.frozen = frozen

    def _act(self, act: str) -> None:
        found = self._named(act)
        if self._can_apply(found):
            self._apply(found)
        elif found.way is not None:
            self._look(found)
        elif self._on_note is not None and found in self._notable:
            self._on_note(found)
        else:
            raise IgnoredError(act)

    def _answer(self, act: str, typed: str) -> None:
        """GiB of what a node has."""
        question = self._named(act).question
        if question is None:
            raise IgnoredError(act)
        self._take(question.answered(typed_bytes(f"Cluster.{question.field}", typed)))

    def _named(self, act: str) -> Finding:
        """By name: the list may have changed since it was drawn where the click came from."""
        found = dict(zip(acts_of(self.findings), self.findings, strict=True)).get(act)
        if found is None:
            raise IgnoredError(act)
        return found

    def _apply(self, found: Finding) -> None:
        if found.source is not None and self._on_apply_source is not None:
            self._on_apply_source(found.source)
            return
        if found.plan is not None:
            self._take(found.plan)
        if found.task is not None:
            self.task = found.task
            if self._on_apply_task is not None:
                self._on_apply_task(found.task)

    def _look(self, found: Finding) -> None:
        """Its place is taken by what is found for it, to be read before it is applied."""
        # What is said meanwhile reaches the page before the search begins.
        self._put(found, replace(found, change=LOOKING, way=None))
        self._put(replace(found, change=LOOKING, way=None), found.look())

    def _put(self, old: Finding, new: Finding) -> None:
        self.show([new if one == old else one for one in self.findings], self._notable)

    def _take(self, plan: ss.Plan) -> None:
        self.plan = plan
        if self._on_apply is not None:
            self._on_apply(plan)

    def _verb(self, finding: Finding) -> str | None:
        """What its button says; None: it has none."""
        if finding.question is not None or self._can_apply(finding):
            return "Apply"
        if finding.way is not None:
            return "Find"
        return "Note" if self._on_note is not None and finding in self._notable else None

    def _can_apply(self, finding: Finding) -> bool:
        """Whether a click can mend it."""
        in_text = finding.source is not None and self._on_apply_source is not None
        return in_text or finding.plan is not None or finding.task is not None


def acts_of(findings: Sequence[Finding]) -> list[str]:
    """What tells each from the others: its name, and of a script its line, where it may be found twice."""
    names = [one.name if one.line is None else f"{one.name}:{one.line}" for one in findings]
    before = [names[:place].count(name) for place, name in enumerate(names)]
    return [f"{name}:{again}" if again else name for name, again in zip(names, before, strict=True)]


def worst_first(findings: Sequence[Finding]) -> list[Finding]:
    """By severity; within one, as they were found."""
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def summary(findings: Sequence[Finding]) -> str:
    """``1 danger, 2 warnings, 1 hint``."""
    counts = [(name, sum(finding.severity == name for finding in findings)) for name in SEVERITIES]
    return ", ".join(f"{number} {name}{'s' if number > 1 else ''}" for name, number in counts if number)


def in_html(findings: Sequence[Finding], rows: Sequence[str]) -> str:
    """The list of ``rows`` under how many ``findings`` of which severity they are."""
    return (
        f"<h2>{summary(findings)} <span class='ss-hint'>before a run finds out</span></h2>"
        f"<ul class='ss-findings'>{''.join(rows)}</ul>"
    )


def _row(finding: Finding, act: str, verb: str | None) -> str:
    """One finding; ``verb`` is what its button says, if it has one."""
    title = " ".join(_SPELLED.get(word, word) for word in finding.name.split("-"))
    title = title[:1].upper() + title[1:]
    mend = f"<span>{escape(finding.change)}</span>"
    if finding.question is not None:
        mend += (
            f"<label class='ss-answer'><input type='text' inputmode='decimal'"
            f" data-answer='{escape(act, quote=True)}'"
            f" aria-label='{escape(finding.change, quote=True)}, in GiB'> GiB</label>"
        )
    if verb is not None:
        label = escape(f"{verb}: {finding.change}", quote=True)
        mend += (
            f"<button type='button' class='ss-act' data-act='{escape(act, quote=True)}'"
            f" aria-label='{label}'>{verb}</button>"
        )
    return (
        f"<li class='ss-is-{finding.severity}'><div class='ss-severity'><i>{SIGNS[finding.severity]}</i> "
        f"{finding.severity}</div><div><b>{escape(title)}</b><p>{escape(finding.why)}</p>"
        f"<div class='ss-mend'>{mend}</div></div></li>"
    )
