"""The table of runs as HTML: name and plan, status, last loss, steps, duration, start, and its buttons."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from html import escape
from math import isfinite

from shardscope.core.number_format import format_count
from shardscope.planner.advice.descriptions import name_plan
from shardscope.runs.summaries import RunSummary
from shardscope_widgets.kit.display_names import describe_devices, name_model
from shardscope_widgets.run.run_html import format_duration, render_status_sign

EMPTY = (
    "No runs yet. Runs launched from the notebooks of this folder are stored in <code>runs/</code> and "
    "listed here."
)
HEAD = (
    "<thead><tr><th class='ss-pick-cell'><span class='ss-off-screen'>compare</span></th>"
    "<th class='ss-text'>Run</th><th class='ss-text'>Status</th><th>Last loss</th><th>Started</th>"
    "<th><span class='ss-off-screen'>actions</span></th></tr></thead>"
)


def render_runs_table(
    rows: Mapping[str, RunSummary],
    selected: Collection[str],
    why_not_resume: Callable[[RunSummary], str | None],
) -> str:
    """Return the table of ``rows``, keyed by what their buttons send, with the ``selected`` ones checked.

    ``why_not_resume`` returns why a run cannot be resumed now, for its button's tooltip, or None if it can.
    """
    if not rows:
        return f"<div class='ss-hint ss-no-runs'>{EMPTY}</div>"
    body = "".join(
        _render_row(
            key,
            summary,
            is_selected=key in selected,
            why_not_resume=why_not_resume(summary),
        )
        if summary.run is not None
        else _render_damaged_row(summary)
        for key, summary in rows.items()
    )
    return f"<table class='ss-table ss-runs'>{HEAD}<tbody>{body}</tbody></table>"


def describe_plan(summary: RunSummary) -> str:
    """Return ``Llama 3.1 8B on 8 × H100 SXM 80 GB, FSDP2 (tp 2)`` as text, after the job of a cluster."""
    plan = summary.plan
    if plan is None:
        return "plan cannot be read"
    method = {"full": "", "lora": ", LoRA", "qlora": ", QLoRA"}[plan.recipe.method]
    model, gpus = name_model(plan.architecture), describe_devices(plan.cluster)
    target = summary.run.target if summary.run is not None else ""
    # The job before the plan: a narrow list cuts what is last.
    return (f"{target} · " if target else "") + f"{model} on {gpus}, {name_plan(plan, plan.recipe)}{method}"


def format_time(created: float, now: float | None = None) -> str:
    """Return ``today 14:02``, ``yesterday 14:02``, ``12 Nov 14:02`` or ``12 Nov 2025``; empty if unknown."""
    try:
        # The time is read from the run's folder, whose files may be damaged.
        then = datetime.fromtimestamp(created)
    except (ValueError, OverflowError, OSError):
        return ""
    if created <= 0:
        return ""
    today = datetime.fromtimestamp(time.time() if now is None else now).date()
    days = (today - then.date()).days
    if days in (0, 1):
        return f"{'today' if days == 0 else 'yesterday'} {then:%H:%M}"
    return f"{then.day} {then:%b %H:%M}" if then.year == today.year else f"{then.day} {then:%b %Y}"


def format_loss(loss: float | None) -> str:
    """Return ``2.345``; ``nan`` and ``inf`` unchanged; a dash without a loss."""
    if loss is None:
        return "–"
    return f"{loss:.3f}" if isfinite(loss) and abs(loss) < 1e4 else f"{loss:.3g}"


def format_steps(done: int | None, total: int | None) -> str:
    """Return ``40 of 300 steps``, ``40 steps`` without a known total, ``no steps`` before the first one."""
    if done is None and total is None:
        return "no steps"
    if total is None:
        return format_count(done or 0, "step")
    return f"{done or 0:,} of {format_count(total, 'step')}"


def make_printable(name: str) -> str:
    """Return the folder name ``name`` as printable text: invalid UTF-8 cannot be sent to a page."""
    return name.encode(errors="replace").decode()


def _render_row(key: str, summary: RunSummary, *, is_selected: bool, why_not_resume: str | None) -> str:
    name = escape(make_printable(summary.name), quote=True)
    plan = escape(describe_plan(summary), quote=True)
    before = summary.resumed_from
    history = f" · continues {escape(make_printable(before), quote=True)}" if before else ""
    ticked = "true" if is_selected else "false"
    buttons = _render_buttons(key, name, summary, why_not_resume)
    seconds = summary.seconds
    cells = (
        f"<td>{render_status_sign(summary.status, summary.reason, hangs=summary.is_hanging)}</td>",
        _render_cell(
            "loss", format_loss(summary.loss), format_steps(summary.num_steps_done, summary.num_steps)
        ),
        _render_cell(
            "started", format_time(summary.created), "" if seconds is None else format_duration(seconds)
        ),
    )
    return (
        f"<tr data-act='open:{key}'{' class=ss-picked' if is_selected else ''}>"
        # A button in the role of a checkbox: Clickable sends the data-act of buttons.
        f"<td class='ss-pick-cell'><button type='button' class='ss-pick' role='checkbox' "
        f"aria-checked='{ticked}' data-act='select:{key}' aria-label='Select {name} to compare it' "
        f"title='Select to compare'></button></td>"
        f"<th scope='row'><button type='button' class='ss-open' data-act='open:{key}' "
        f"title='{name}: open'>{name}</button>"
        f"<div class='ss-hint ss-clipped' title='{plan}{history}'>{plan}{history}</div></th>"
        + "".join(cells)
        + f"<td class='ss-run-acts'><div>{buttons}</div></td></tr>"
    )


def _render_cell(name: str, text: str, below: str) -> str:
    """Return a cell of two lines; its name tells the stylesheet its position in a narrow list."""
    return f"<td data-label='{name}'>{escape(text)}<div class='ss-hint'>{escape(below)}</div></td>"


def _render_buttons(key: str, name: str, summary: RunSummary, reason: str | None) -> str:
    if summary.is_live:
        if summary.status == "queued":
            return _render_button(f"stop:{key}", "Cancel", f"Cancel {name}", "Take this job out of the queue")
        return _render_button(f"stop:{key}", "Stop", f"Stop {name}", "End this run now")
    buttons = ""
    if summary.failed_early:
        buttons += _render_button(
            f"resume:{key}",
            "Resume",
            f"Resume {name}",
            "Launch a run that continues from the last checkpoint" if reason is None else reason,
            is_off=reason is not None,
        )
    if summary.has_trace:
        buttons += _render_button(f"trace:{key}", "Open trace", f"Open the trace of {name}", "")
    return buttons


def _render_button(act: str, text: str, label: str, tooltip: str, *, is_off: bool = False) -> str:
    """Return a button; a disabled one stays focusable, so that its reason is readable without a mouse."""
    off = " aria-disabled='true'" if is_off else ""
    why = f"{label}: {escape(tooltip, quote=True)}" if is_off else label
    return (
        f"<button type='button' class='ss-act' data-act='{act}' aria-label='{why}' "
        f"title='{escape(tooltip, quote=True)}'{off}>{text}</button>"
    )


def _render_damaged_row(summary: RunSummary) -> str:
    name, damage = (
        escape(make_printable(summary.name), quote=True),
        escape(make_printable(summary.damage), quote=True),
    )
    return (
        f"<tr class='ss-damaged'><td class='ss-pick-cell'></td><th scope='row'>"
        f"<div class='ss-open ss-clipped' title='{name}'>{name}</div>"
        f"<div class='ss-hint ss-clipped' title='{damage}'>{damage}</div></th>"
        f"<td>{render_status_sign('damaged', summary.damage)}</td><td data-label='loss'></td>"
        f"{_render_cell('started', format_time(summary.created), '')}<td></td></tr>"
    )
