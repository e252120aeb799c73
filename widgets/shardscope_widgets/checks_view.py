"""What of a plan runs, but badly: ``plan.findings()`` as a list, with the button that mends each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

import traitlets

import shardscope as ss
from shardscope.frameworks.registry import frameworks
from shardscope.planner.preflight import SEVERITIES, Finding
from shardscope_widgets import shared
from shardscope_widgets.clickable import Clickable, IgnoredError
from shardscope_widgets.sheet import Sheet
from shardscope_widgets.view import View

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

NOTHING = "Nothing to mend: no check has anything against this plan."


class ChecksView(View):
    """Findings, the worst first: how bad, why with the number behind it, and what mends it.

    A button applies the mended plan: ``on_apply`` gets it, and :attr:`plan` has it; a mended task goes to
    ``on_apply_task`` and :attr:`task`, a script's mended text to ``on_apply_source`` and :attr:`source`.
    """

    plan = traitlets.Any(allow_none=True, default_value=None, help="The plan that was applied last.")
    task = traitlets.Any(allow_none=True, default_value=None, help="The task that was applied last.")
    source = traitlets.Unicode(allow_none=True, default_value=None, help="The text that was applied last.")

    def __init__(
        self,
        plan: ss.Plan | None = None,
        *,
        on_apply: Callable[[ss.Plan], None] | None = None,
        on_apply_task: Callable[[object], None] | None = None,
        on_apply_source: Callable[[str], None] | None = None,
        nothing: str = NOTHING,
    ) -> None:
        self.findings: list[Finding] = []
        self._on_apply, self._on_apply_task = on_apply, on_apply_task
        self._on_apply_source, self._nothing = on_apply_source, nothing
        self.list = Clickable(self._act)
        super().__init__([Sheet(), self.list], layout=shared.layout())
        for name in ("ss-root", "ss-view", "ss-checks"):
            self.add_class(name)
        if plan is not None:
            self.show(plan.findings())

    def show(self, findings: Sequence[Finding]) -> None:
        """Draw findings."""
        self.findings = worst_first(findings)
        self.list.value = in_html(self.findings, self._nothing)

    def freeze(self, frozen: bool) -> None:
        """Let nothing be pressed: what is shown is no answer to what is asked now."""
        self.list.frozen = frozen

    def _act(self, act: str) -> None:
        # By name: the list may have changed since it was drawn where the click came from.
        found = next((finding for finding in self.findings if _act_of(finding) == act), None)
        if found is None or not _is_applied(found):
            raise IgnoredError(act)
        if found.source is not None:
            self.source = found.source
            if self._on_apply_source is not None:
                self._on_apply_source(found.source)
        if found.plan is not None:
            self.plan = found.plan
            if self._on_apply is not None:
                self._on_apply(found.plan)
        if found.task is not None:
            self.task = found.task
            if self._on_apply_task is not None:
                self._on_apply_task(found.task)


def _is_applied(finding: Finding) -> bool:
    """Whether a click can mend it."""
    return finding.plan is not None or finding.task is not None or finding.source is not None


def _act_of(finding: Finding) -> str:
    """Its name; a script may have one of a kind on several lines."""
    return finding.name if finding.line is None else f"{finding.name}:{finding.line}"


def worst_first(findings: Sequence[Finding]) -> list[Finding]:
    """By severity; within one, as they were found."""
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def summary(findings: Sequence[Finding]) -> str:
    """``1 danger, 2 warnings, 1 hint``."""
    counts = [(name, sum(finding.severity == name for finding in findings)) for name in SEVERITIES]
    return ", ".join(f"{number} {name}{'s' if number > 1 else ''}" for name, number in counts if number)


def in_html(findings: Sequence[Finding], nothing: str = NOTHING) -> str:
    """The list, or that there is nothing to mend."""
    if not findings:
        return f"<p class='ss-hint'>{nothing}</p>"
    rows = "".join(_row(finding) for finding in findings)
    return (
        f"<h2>{summary(findings)} <span class='ss-hint'>before a run finds out</span></h2>"
        f"<ul class='ss-findings'>{rows}</ul>"
    )


def _row(finding: Finding) -> str:
    title = " ".join(_SPELLED.get(word, word) for word in finding.name.split("-"))
    title = title[:1].upper() + title[1:]
    mend = f"<span>{escape(finding.change)}</span>"
    if _is_applied(finding):
        label = escape(f"Apply: {finding.change}", quote=True)
        mend += (
            f"<button type='button' class='ss-act' data-act='{escape(_act_of(finding), quote=True)}'"
            f" aria-label='{label}'>Apply</button>"
        )
    return (
        f"<li class='ss-is-{finding.severity}'><div class='ss-severity'><i>{SIGNS[finding.severity]}</i> "
        f"{finding.severity}</div><div><b>{escape(title)}</b><p>{escape(finding.why)}</p>"
        f"<div class='ss-mend'>{mend}</div></div></li>"
    )
