"""The text of the run view: status, progress, numbers, the slowest rank; charts and memory as tables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape

import shardscope as ss
from shardscope.core.number_format import Scale
from shardscope.records.follow import Follow
from shardscope.records.nodes import RunNode
from shardscope.runs.explain.memory_by_rank import RankMemory
from shardscope.runs.explain.predicted_metrics import PredictedMetrics
from shardscope.runs.watch.pace import EVEN_EXCESS, SlowestNode, SlowestRank
from shardscope_widgets.kit.display_names import describe_plan
from shardscope_widgets.kit.numbers import Unit
from shardscope_widgets.kit.theme import BESIDE_COLOURS, COMPONENT_COLOURS, RANK_COLOURS, RANK_DASHES
from shardscope_widgets.run.figure import MAX_LINES
from shardscope_widgets.run.panels import Panel, is_number

STATUS_SIGNS = {
    "queued": "◌",
    "starting": "◌",
    "running": "●",
    "stopping": "◐",
    "finished": "✓",
    "stopped": "■",
    "failed": "✕",
    "lost": "✕",
    "damaged": "✕",
    "unknown": "?",
}
"""A shape for each status, so that it does not depend on colour alone."""
HANG_SIGN = "▲"
"""The shape of a running run whose ranks make no progress."""
STATUS_CLASSES = {
    "queued": "ss-living",
    "starting": "ss-living",
    "running": "ss-living",
    "stopping": "ss-living",
    "finished": "ss-fits",
    "failed": "ss-lacks",
    "lost": "ss-lacks",
    "damaged": "ss-lacks",
}
MAX_ATTEMPTS_SHOWN = 10
MAX_REASON = 300
"""Most characters of the reason for an attempt's end."""
SVG_DASHES = {"solid": "", "dash": "6 3", "dot": "2 2", "dashdot": "6 2 2 2"}


def render_status_sign(
    status: str, reason: str = "", *, hangs: bool = False, place: str = "ss-row-status"
) -> str:
    """Return the symbol and name of a status as HTML, with ``reason`` as its tooltip.

    ``hangs``: the ranks make no progress. The status comes from a file in the run folder; an invalid one is
    shown as "unknown". ``place`` is the CSS class: of a row of the list, or of the opened run.
    """
    known = status if status in STATUS_SIGNS else "unknown"
    sign, colour = (HANG_SIGN, "ss-tight") if hangs else (STATUS_SIGNS[known], STATUS_CLASSES.get(known, ""))
    tooltip = f" title='{escape(reason, quote=True)}'" if reason else ""
    return (
        f"<b class='{place} {colour}' data-status='{known}'{tooltip}>"
        f"<span class='ss-shape' aria-hidden='true'>{sign}</span> {known}</b>"
    )


def render_heading(run: ss.Run, status: str) -> str:
    """Return lines of fixed height: status and name, the reason, the plan that is trained.

    The reason of a failure or a hang, or one of several clauses, may take several lines. A run that was
    started again has one line more, about its attempts.
    """
    try:
        plan = describe_plan(run.plan)
    except Exception:  # The plan is damaged or of another version: show the run without it.
        plan = ""
    name, reason = escape(run.name, quote=True), escape(run.reason, quote=True)
    target = escape(run.target, quote=True)
    hangs = run.is_hanging
    sign = render_status_sign(status, run.reason, hangs=hangs, place="ss-status")
    if hangs:
        line = "class='ss-hint ss-run-reason ss-tight' data-said='hang'"
    elif status in ("failed", "lost") or ";" in run.reason:
        # What is to be known of a run follows a semicolon, such as a checkpoint that was not saved.
        line = "class='ss-hint ss-run-reason'"
    else:
        line = "class='ss-hint ss-clipped'"
    where = f" <span class='ss-hint ss-run-target'>{target}</span>" if target else ""
    return (
        f"<div class='ss-clipped' data-said='run'>{sign} "
        f"<span class='ss-run-name'>{name}</span>{where}</div>"
        # A no-break space keeps the height of an empty line: a reason that appears must not move the page.
        f"<div {line} title='{reason}'>{reason or '&nbsp;'}</div>"
        f"{render_attempts(run.attempts)}"
        f"<div class='ss-hint ss-clipped ss-run-plan' title='{_strip_tags(plan)}'>{plan or '&nbsp;'}</div>"
    )


def render_attempts(attempts: Sequence[Mapping[str, object]]) -> str:
    """Return one line of HTML: where the latest attempt began, and why the one before it ended.

    Empty for fewer than two attempts. The tooltip has the last ``MAX_ATTEMPTS_SHOWN``.
    """
    if len(attempts) < 2:
        return ""
    *before, latest = attempts
    ended = before[-MAX_ATTEMPTS_SHOWN + 1 :]
    lines = [f"{_describe_beginning(item)}; {_describe_end(item)}" for item in ended]
    tooltip = "\n".join([*lines, _describe_beginning(latest)])
    text = f"{_describe_beginning(latest)}; {_describe_end(before[-1])}"
    return (
        f"<div class='ss-hint ss-clipped ss-run-attempts' title='{escape(tooltip, quote=True)}'>"
        f"{escape(text)}</div>"
    )


def _describe_beginning(attempt: Mapping[str, object]) -> str:
    name, from_step = f"attempt {attempt['attempt']}", attempt["from_step"]
    if attempt["began"] is None:
        return f"{name} is starting"
    if attempt["checkpoint"] is not None:
        return f"{name} resumed from step {from_step:,}"
    return f"{name} started at the beginning"


def _describe_end(attempt: Mapping[str, object]) -> str:
    ends = {"stopped": "stopped", "failed": "failed", "lost": "was lost", "finished": "finished"}
    end = f"attempt {attempt['attempt']} {ends.get(str(attempt['status']), 'ended')}"
    # One short line: the reason is a file's text, which anybody may have written.
    reason = " ".join(str(attempt["reason"] or "").split())[:MAX_REASON]
    return f"{end}: {reason}" if reason else end


def _strip_tags(html: str) -> str:
    """Return the plain text of markup written by Shardscope, for a tooltip."""
    return re.sub(r"<[^>]*>", "", html).replace("'", "&#x27;")


def render_progress_bar(done: int, total: int) -> str:
    """Return a progress bar, with the numbers for screen readers and as a tooltip."""
    share = min(1.0, done / total)
    text = f"{done:,} of {total:,} steps"
    return (
        f"<div class='ss-progress' role='progressbar' aria-label='steps' aria-valuemin='0' "
        f"aria-valuemax='{total}' aria-valuenow='{min(done, total)}' aria-valuetext='{text}' "
        f"title='{text}'><i style='width:{100 * share:.2f}%'></i></div>"
    )


def render_figures(entries: Sequence[tuple[str, str, str]]) -> str:
    """Return figures with their names and explanations: (figure, name, tooltip)."""
    cells = "".join(
        f"<div title='{escape(why, quote=True)}'><b>{escape(value)}</b> <span>{escape(name)}</span></div>"
        for value, name, why in entries
    )
    return f"<div class='ss-figures ss-facts'>{cells}</div>" if cells else ""


def format_duration(seconds: float) -> str:
    """Return ``45 s``, ``12 minutes``, ``3.4 hours`` or ``2.1 days``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} minutes"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} hours"
    return f"{seconds / 86_400:.1f} days"


def describe_sample(follow: Follow) -> tuple[str, str, str]:
    """Return the fraction of the metrics that is shown, as an entry of :func:`render_figures`."""
    share = follow.num_read_bytes / (follow.num_read_bytes + follow.num_skipped_bytes)
    why = (
        "The ranks log more lines than a view can read: numbers and charts show an even sample of them, and "
        "the latest ones. run.metrics() and the folder's events have all."
    )
    return f"{max(1, round(100 * share))} %", "of the logged lines are shown", why


def describe_slowest_rank(slowest: SlowestRank, node: str = "") -> tuple[str, str, str]:
    """Return the slowest rank and how much slower it is, if any, as an entry of :func:`render_figures`.

    ``node`` is the name of its node; empty for a run of one machine.
    """
    ranks = f"{slowest.num_ranks:,} ranks"
    name = f"rank {slowest.rank} on {node}" if node else f"rank {slowest.rank}"
    if slowest.is_even:
        why = (
            "The medians of the last steps differ by less than 2 %. Ranks that exchange gradients wait for "
            "each other in every step; a trace shows which rank the others wait for."
        )
        return "balanced", f"{ranks}, within 2\u00a0%", why
    typical = Scale.for_seconds(slowest.seconds)
    step = f"Its median step takes {typical.format(slowest.seconds)} {typical.unit}"
    if slowest.steps_behind:
        by = f"{slowest.steps_behind:,} steps behind"
        return (
            name,
            f"slowest of {ranks}: {by}",
            f"{step}; it has not logged the last steps of the others.",
        )
    by = f"by {100 * slowest.excess:.0f} %"
    return (
        name,
        f"slowest of {ranks}: steps +{100 * slowest.excess:.0f} %",
        f"{step}, {by} longer than the others' median.",
    )


def describe_slowest_node(slowest: SlowestNode, name: str, num_nodes: int) -> tuple[str, str, str]:
    """Return the slowest of several nodes as an entry of :func:`render_figures`."""
    nodes = f"{num_nodes:,} nodes"
    if slowest.excess < EVEN_EXCESS:
        return (
            "balanced",
            f"{nodes}, within 2\u00a0%",
            "The median steps of the nodes differ by less than 2 %.",
        )
    by = f"by {100 * slowest.excess:.0f} %"
    longer = f"slowest of {nodes}: steps +{100 * slowest.excess:.0f} %"
    return name, longer, f"The median step of its ranks is {by} longer than the others'."


def render_swatch(rank: int) -> str:
    """Return a sample of the rank's line in the charts, with its colour and dashes."""
    if rank >= MAX_LINES:
        return "<i class='ss-line-swatch'></i>"
    dashes = SVG_DASHES[RANK_DASHES[rank % len(RANK_DASHES)]]
    return (
        "<svg class='ss-line-swatch' viewBox='0 0 20 4' aria-hidden='true'><path d='M0 2H20' "
        f"stroke='{RANK_COLOURS[rank]}' stroke-width='3' stroke-dasharray='{dashes}'/></svg>"
    )


def render_legend(num_ranks: int) -> str:
    """Return which line is which rank's; empty for one rank."""
    if num_ranks < 2:
        return ""
    shown = min(num_ranks, MAX_LINES)
    entries = "".join(
        f"<span class='ss-entry'>{render_swatch(rank)}rank {rank}</span>" for rank in range(shown)
    )
    more = f"<span>of {num_ranks:,} ranks</span>" if num_ranks > shown else ""
    return f"<div class='ss-rank-legend ss-hint'>{entries}{more}</div>"


def render_latest_table(
    latest: Mapping[int, Mapping[str, object]],
    charts: Mapping[Panel, tuple[str, float]],
    expected: PredictedMetrics | None,
    slowest: SlowestRank | None,
    nodes: Sequence[RunNode] = (),
) -> str:
    """Return the latest values of each rank, a column per chart; the last row is the prediction.

    The ranks of a run on several ``nodes`` have the name of theirs.
    """
    node_names = {rank: f"{node.name}{_describe_clock(node)}" for node in nodes for rank in node.ranks}
    if not latest:
        return ""
    panels, units = list(charts), list(charts.values())
    head = "".join(
        f"<th>{escape(panel.title + (f', {unit}' if unit else ''))}</th>"
        for panel, (unit, _) in zip(panels, units, strict=True)
    )
    ranks = sorted(latest)
    # The same ranks as in the charts, and the slowest one, about which the facts above speak.
    shown = ranks[:MAX_LINES]
    if slowest is not None and not slowest.is_even and slowest.rank in ranks and slowest.rank not in shown:
        shown.append(slowest.rank)
    rows = "".join(
        f"<tr><th scope='row'>{render_swatch(rank)}rank {rank}{_render_node(node_names.get(rank))}</th>"
        f"<td>{_format_step(latest[rank].get('step'))}</td>"
        + "".join(
            f"<td>{panel.format(latest[rank].get(panel.metric), scale)}</td>"
            for panel, (_, scale) in zip(panels, units, strict=True)
        )
        + "</tr>"
        for rank in shown
    )
    more = len(ranks) - len(shown)
    left_out = (
        f"<div class='ss-hint'>and {more:,} more ranks, also considered for the slowest rank</div>"
        if more
        else ""
    )
    return (
        "<div class='ss-scroll' tabindex='0' role='group' aria-label='latest values of each rank'>"
        f"<table class='ss-table ss-latest'><thead><tr><th>latest</th><th>step</th>{head}</tr></thead>"
        f"<tbody>{rows}</tbody>{_render_predicted_row(panels, units, expected)}</table></div>"
        f"{left_out if more else ''}{_render_predicted_note(expected)}"
    )


def _describe_clock(node: RunNode) -> str:
    seconds = node.clock_seconds
    direction = "ahead of" if seconds > 0 else "behind"
    return f", clock {format_duration(abs(seconds))} {direction} node 0's" if seconds else ""


def _render_node(name: str | None) -> str:
    return "" if name is None else f" <span class='ss-hint'>{escape(name)}</span>"


def _render_predicted_row(
    panels: Sequence[Panel], units: Sequence[tuple[str, float]], expected: PredictedMetrics | None
) -> str:
    if expected is None or all(expected.get(panel.metric) is None for panel in panels):
        return ""
    cells = "".join(
        f"<td>{panel.format(expected.get(panel.metric), scale)}</td>"
        for panel, (_, scale) in zip(panels, units, strict=True)
    )
    dashes = (
        "<svg class='ss-line-swatch' viewBox='0 0 20 4' aria-hidden='true'><path d='M0 2H20' "
        "stroke='currentColor' stroke-width='1.5' stroke-dasharray='8 4'/></svg>"
    )
    return f"<tfoot><tr><th scope='row'>{dashes}predicted</th><td></td>{cells}</tr></tfoot>"


def _render_predicted_note(expected: PredictedMetrics | None) -> str:
    if expected is None:
        return ""
    step = (
        f"Step time and tokens/s: {expected.step_source}."
        if expected.step_seconds and expected.step_source
        else ""
    )
    memory = f"Memory: {expected.memory_content}." if expected.peak_memory_bytes is not None else ""
    text = " ".join(filter(None, ("Predicted at launch.", memory, step)))
    return f"<div class='ss-hint'>{escape(text)}</div>" if memory or step else ""


def render_memory_table(
    by_rank: Mapping[int, RankMemory], predicted: Mapping[str, int] | None, caption: str
) -> str:
    """Return the tensors of each rank at its peak, as bars on the prediction's scale and as numbers."""
    if not by_rank:
        return ""
    rows: list[tuple[str, Mapping[str, int]]] = [("predicted", predicted)] if predicted else []
    shown = sorted(by_rank)[:MAX_LINES]
    # The rank closest to running out of memory is always shown.
    fullest = max(by_rank, key=lambda rank: by_rank[rank].num_bytes)
    shown += [] if fullest in shown else [fullest]
    rows += [(f"rank {rank}", by_rank[rank].components) for rank in shown]
    names = [
        name for name in (*COMPONENT_COLOURS, "other") if any(components.get(name) for _, components in rows)
    ]
    # One scale for all bars, so that ranks can be compared with each other and with the prediction.
    most = max(sum(components.values()) for _, components in rows)
    unit = Unit.for_bytes(most)
    head = "".join(
        f"<th><i class='ss-swatch ss-block' style='background:{_find_colour(name)}'></i>"
        f"{name.replace('_', ' ')}</th>"
        for name in names
    )
    body = "".join(
        f"<tr><th scope='row'>{row_name}</th>"
        f"<td class='ss-bar-cell'>{_render_bar(components, names, most, unit)}</td>"
        f"<td><b>{unit.format(sum(components.values()))}</b></td>"
        + "".join(
            f"<td>{unit.format(components[name]) if components.get(name) else '–'}</td>" for name in names
        )
        + "</tr>"
        for row_name, components in rows
    )
    more = len(by_rank) - len(shown)
    left_out = f" {more:,} more ranks used less than the highest one shown." if more > 0 else ""
    return (
        f"<h2>Memory by component <span class='ss-hint'>tensors at the peak, {unit.name}</span></h2>"
        "<div class='ss-scroll' tabindex='0' role='group' aria-label='memory of each rank by component'>"
        f"<table class='ss-table ss-parts'><thead><tr><th></th><th></th><th>total</th>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div><div class='ss-hint'>{escape(caption)}{left_out}</div>"
    )


def _render_bar(components: Mapping[str, int], names: Sequence[str], most: int, unit: Unit) -> str:
    parts = "".join(
        f"<i title='{name.replace('_', ' ')}: {unit.format(components[name])} {unit.name}' "
        f"style='width:{100 * components[name] / most:.2f}%;background:{_find_colour(name)}'></i>"
        for name in names
        if components.get(name)
    )
    return f"<div class='ss-bar' aria-hidden='true'>{parts}</div>"


def _find_colour(name: str) -> str:
    return COMPONENT_COLOURS.get(name) or BESIDE_COLOURS["other"]


def _format_step(value: object) -> str:
    return f"{value:,}" if is_number(value) else "–"
