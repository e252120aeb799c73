"""Findings as HTML: a list with severity, title, reason and suggested fix."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from shardscope.frameworks.registry import frameworks
from shardscope.planner.checks import SEVERITIES, Finding
from shardscope_widgets.kit.numbers import keep_units
from shardscope_widgets.pickers.layout import LABELS, VALUE_LABELS
from shardscope_widgets.pickers.recipe_choices import ADVANCED_LABELS

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
_INPUTS = {
    **LABELS,
    **ADVANCED_LABELS,
    "seq_len": "Sequence",
    "micro_batch_size": "Micro-batch",
    "global_batch_size": "Global batch",
    "num_steps": "Steps",
    "warmup": "Warm-up",
    "profile": "Record a trace",
}
"""Field -> label of its input, where that is not the field's own name."""
_QUESTIONS = {
    "host_memory_bytes": "Enter the host memory of each node",
    "nvme_bytes": "Enter the NVMe capacity of each node",
}
"""Field of a finding's question -> its text."""
# A field of a call, as in "Pretrain(profile=True)", is code.
_ASSIGNMENT = re.compile(r"(?<![\w(.])([a-z_]\w*)=('[^']*'|[\w.+-]*\w)")


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
    fix = f"<span><b>Suggested fix:</b> {escape(keep_units(write_change(finding)))}</span>{controls}"
    return (
        f"<li class='ss-is-{finding.severity}'><div class='ss-severity'>"
        f"<i aria-hidden='true'>{SIGNS[finding.severity]}</i> {finding.severity}</div>"
        f"<div><b>{escape(write_title(finding))}</b> {where}<p>{escape(keep_units(finding.why))}</p>"
        f"<div class='ss-fix'>{fix}</div></div></li>"
    )


def write_change(finding: Finding) -> str:
    """Return the suggested fix with the names of inputs: ``steps 5`` for ``num_steps=5``.

    The fix of a line of a script stays code. A question has its input beside it.
    """
    if finding.question is not None:
        return _QUESTIONS.get(finding.question.field, finding.change)
    return finding.change if finding.line is not None else _ASSIGNMENT.sub(_name_input, finding.change)


def _name_input(assignment: re.Match[str]) -> str:
    """Return ``tensor 2`` for ``tp=2``, and ``offload CPU`` for ``offload='cpu'``."""
    field, text = assignment.groups()
    label = _INPUTS.get(field, field.replace("_", " "))
    # "LoRA rank" and "ZeRO stage" keep their capitals.
    first = label.partition(" ")[0]
    label = label[:1].lower() + label[1:] if first[1:].islower() else label
    values = {repr(value): shown for value, shown in VALUE_LABELS.get(field, {}).items()}
    shown = values.get(text) or {"True": "on", "False": "off", "None": "not set"}.get(text, text.strip("'"))
    return f"{label} {shown}"


def write_title(finding: Finding) -> str:
    """Return the name of a finding as a title: ``Gather bound by links``."""
    # Names of findings are identifiers such as gather-bound-by-links.
    words = " ".join(_SPELLED.get(word, word) for word in finding.name.split("-"))
    return words[:1].upper() + words[1:]
