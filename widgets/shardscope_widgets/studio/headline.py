"""The Studio's headline (what is trained on what, if it fits, how fast it is), and the notice below it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from html import escape

import shardscope as ss
from shardscope.core.cluster import name_device
from shardscope.core.number_format import format_gib
from shardscope.memory.report import MemoryReport
from shardscope.planner.verdict import Verdict
from shardscope_widgets.kit.clickable import Clickable, IgnoredError
from shardscope_widgets.kit.display_names import describe_devices, format_name

STATE_CLASSES = {"fits": "ss-fits", "tight": "ss-tight", "unknown": "ss-tight", "does not fit": "ss-lacks"}
STATE_SIGNS = {"fits": "✓", "tight": "!", "unknown": "?", "does not fit": "✕"}
"""A symbol for each state, so that it does not depend on colour alone."""

FORM_FACTOR = re.compile(r" (SXM|PCIe|OAM)(?= |$)")
NODES = re.compile(r"^[\d,]+ nodes of \d+")
"""Parts left out of the short line; the full name is in the tooltip."""


def render_headline(plan: ss.Plan, report: MemoryReport, verdict: Verdict) -> str:
    """Return the plan and its verdict as HTML. Long ones are truncated and show the full text on hover."""
    rank = plan.recipe.adapter_rank
    methods = {"full": "full training", "lora": f"LoRA rank {rank}", "qlora": f"QLoRA rank {rank}"}
    method = methods[plan.recipe.method]
    model, gpus = format_name(plan.architecture.name), describe_devices(plan.cluster)
    layout = plan.layout.description
    plain = f"{model} on {gpus} with {layout}, {method}, {plan.recipe.precision}"
    short = FORM_FACTOR.sub("", NODES.sub(f"{plan.cluster.num_gpus:,}", gpus))
    # Full training is the rule, and its words would not fit beside the numbers in a window of 1,440 pixels.
    how = "" if plan.recipe.method == "full" else f"{method}, "
    what = (
        f"<b>{escape(model)}</b> on <b>{escape(short)}</b> with <b>{escape(layout)}</b>, "
        f"{escape(how)}{escape(plan.recipe.precision)}"
    )
    verdict_text = write_verdict(plan, report, verdict)
    state = STATE_CLASSES[verdict.state]
    tooltip = verdict_text if verdict.state == "fits" else verdict.reason
    return (
        f"<div class='ss-what' title='{escape(plain, quote=True)}'>{what}</div>"
        f"<div class='ss-verdict {state}' data-state='{verdict.state}' title='{escape(tooltip, quote=True)}'>"
        f"<i aria-hidden='true'>{STATE_SIGNS[verdict.state]}</i>{escape(verdict_text)}</div>"
    )


def write_verdict(plan: ss.Plan, report: MemoryReport, verdict: Verdict) -> str:
    """Return one line such as ``Fits: 54.0 of 79.1 GiB on each GPU``, or why the plan may not fit."""
    unit = name_device(plan.cluster)
    where = f"on each {unit}" if plan.world_size > 1 else f"on the {unit}"
    if plan.degrees.pp > 1:
        where = f"on the fullest {unit}, stage {report.worst_stage.stage}"
    memory = f"{format_gib(report.peak_bytes)} of {format_gib(report.usable_bytes)} GiB {where}"
    if verdict.state == "does not fit":
        return f"Does not fit: {verdict.reason[:1].lower()}{verdict.reason[1:].rstrip('.')}"
    if verdict.state == "tight":
        return f"Tight: {memory}; may run out of memory"
    if verdict.state == "unknown":
        needs = " and ".join(
            f"{format_gib(place.needed_bytes)} GiB of {place.name}" for place in verdict.unknown
        )
        return f"Fits if {'each' if plan.cluster.num_nodes > 1 else 'the'} node has {needs}"
    return f"Fits: {memory}"


DISMISS = "dismiss"


class Notice(Clickable):
    """A notice, empty until :meth:`show_message` is called, with a button that dismisses it."""

    def __init__(self) -> None:
        self._actions: dict[str, Callable[[], None]] = {}
        super().__init__(self._handle_action, "ss-notice")

    def show_message(
        self, message: str, actions: Mapping[str, Callable[[], None]] | None = None, *, is_error: bool = False
    ) -> None:
        """Show ``message`` with one button per action; an empty ``message`` dismisses the notice."""
        self._actions = dict(actions or {})
        if not message:
            self.value = ""
            return
        role = "alert" if is_error else "status"
        kind = " class='ss-error'" if is_error else ""
        buttons = "".join(_render_button(name, escape(name)) for name in self._actions)
        dismiss = _render_button(DISMISS, "✕", "aria-label='Dismiss'")
        self.value = f"<span role='{role}'{kind}>{escape(message)}</span>{buttons}{dismiss}"

    def _handle_action(self, name: str) -> None:
        if name == DISMISS:
            self.show_message("")
            return
        if name not in self._actions:
            raise IgnoredError(name)
        do = self._actions[name]
        self.show_message("")
        do()


def _render_button(act: str, label: str, attributes: str = "") -> str:
    name = escape(act, quote=True)
    return f"<button type='button' class='ss-act' data-act='{name}' {attributes}>{label}</button>"
