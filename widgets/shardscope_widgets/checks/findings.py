"""Findings as HTML: a list with severity, title, reason and suggested fix."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from shardscope.frameworks.registry import frameworks
from shardscope.planner.checks import SEVERITIES, Finding
from shardscope_widgets.kit.numbers import keep_units

SIGNS = {"danger": "■", "warning": "▲", "hint": "●"}
"""The symbol of each severity, so that it does not depend on colour alone."""

_SPELLED = {
    "gpu": "GPU",
    "cpu": "CPU",
    "nvme": "NVMe",
    "nccl": "NCCL",
    "fsdp1": "FSDP1",
    **{name: framework.title for name, framework in frameworks.items()},
}
"""Special spellings of parts of a finding's name."""


def sort_worst_first(findings: Sequence[Finding]) -> list[Finding]:
    """Return findings by severity, ties in their original order."""
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def summarize_findings(findings: Sequence[Finding]) -> str:
    """Return ``1 danger, 2 warnings, 1 hint``."""
    counts = [(name, sum(finding.severity == name for finding in findings)) for name in SEVERITIES]
    return ", ".join(f"{number} {name}{'s' if number > 1 else ''}" for name, number in counts if number)


def render_list(findings: Sequence[Finding], rows: Sequence[str]) -> str:
    """Return the list of ``rows`` under the number of ``findings`` of each severity."""
    return f"<h2>{summarize_findings(findings)}</h2><ul class='ss-findings'>{''.join(rows)}</ul>"


def render_finding(finding: Finding, *, place: str = "", controls: str = "") -> str:
    """Return one finding as HTML. ``place``: file and line; ``controls``: HTML of its button and input."""
    where = f"<span class='ss-hint'>{escape(place)}</span>" if place else ""
    fix = f"<span><b>Suggested fix:</b> {escape(keep_units(finding.change))}</span>{controls}"
    return (
        f"<li class='ss-is-{finding.severity}'><div class='ss-severity'>"
        f"<i aria-hidden='true'>{SIGNS[finding.severity]}</i> {finding.severity}</div>"
        f"<div><b>{escape(write_title(finding))}</b> {where}<p>{escape(keep_units(finding.why))}</p>"
        f"<div class='ss-fix'>{fix}</div></div></li>"
    )


def write_title(finding: Finding) -> str:
    """Return the name of a finding as a title: ``Gather bound by links``."""
    # Names of findings are identifiers such as gather-bound-by-links.
    words = " ".join(_SPELLED.get(word, word) for word in finding.name.split("-"))
    return words[:1].upper() + words[1:]
