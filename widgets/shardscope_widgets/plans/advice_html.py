"""Advice in words and lines: the path through the questions, what else there is, what frameworks support."""

from __future__ import annotations

from html import escape

from shardscope.planner.abilities import COLUMNS, Abilities
from shardscope.planner.advice import Advice, Turn


def advised(advice: Advice) -> str:
    """The plan to start with and a button that applies it, or that nothing fits."""
    first, _, rest = advice.why.partition(". ")
    why = f"<p><b>{escape(first)}{'.' if rest else ''}</b> {escape(rest)}</p>"
    if advice.plan is None:
        return f"<div class='ss-advised'>{why}</div>"
    button = "<button type='button' class='ss-act ss-first' data-act='plan'>Apply this plan</button>"
    return f"<div class='ss-advised'>{why}{button}</div>"


def disagrees(advice: Advice) -> str:
    """Where a search finds another plan: which, by how much, and a button. Searches when first asked."""
    if not advice.disagreement:
        return ""
    return (
        f"<div class='ss-note'><b>The search disagrees.</b> {escape(advice.disagreement)} "
        f"{_other(advice)}</div>"
    )


def _other(advice: Advice) -> str:
    """A button that applies the search's plan."""
    if advice.fastest is None:
        return ""
    label = escape(f"Apply the search's plan: {advice.fastest.layout.description}", quote=True)
    return f"<button type='button' class='ss-act' data-act='fastest' aria-label='{label}'>Apply it</button>"


def path(advice: Advice) -> str:
    """Every question in order; those whose answer the plan does not have are pale."""
    steps = "".join(_turn(turn) for turn in advice.path)
    hint = "<span class='ss-hint'>filled: the plan has it; hollow and pale: it does not</span>"
    return f"<h2>The questions on the way {hint}</h2><ol class='ss-path'>{steps}</ol>"


def _turn(turn: Turn) -> str:
    kind, state = ("ss-taken", "taken") if turn.taken else ("ss-passed", "not taken")
    number = f"<div class='ss-number'>{escape(turn.number)}</div>" if turn.number else ""
    return (
        f"<li class='{kind}'><span class='ss-off-screen'>{state}: </span>"
        f"<div class='ss-question'>{escape(turn.question)} <b>{escape(turn.answer)}</b></div>{number}"
        f"<div class='ss-hint'>{escape(turn.why)}</div></li>"
    )


def otherwise(advice: Advice) -> str:
    """Other plans, each with what it gives and costs, or lacks, and a button that applies it."""
    if not advice.alternatives:
        return ""
    rows = "".join(
        f"<li><div>{escape(words)}</div><button type='button' class='ss-act' data-act='{index}'"
        f" aria-label='{escape(f'Apply {plan.layout.description}', quote=True)}'>Apply</button></li>"
        for index, (plan, words) in enumerate(advice.alternatives)
    )
    title = "Otherwise" if advice.plan is not None else "Nearest to it"
    return f"<h2>{title}</h2><ul class='ss-offers'>{rows}</ul>"


def matrix(table: Abilities) -> str:
    """Abilities down, frameworks across; what asks for an ability stands behind its mark, on hover."""
    head = "".join(f"<th scope='col'>{escape(title)}</th>" for title in table.titles.values())
    rows = "".join(
        f"<tr><th scope='row' title='{escape(column.words, quote=True)}'>{escape(column.title)}</th>"
        + "".join(_cell(row[key].supported, row[key].how) for row in table.cells.values())
        + "</tr>"
        for key, column in COLUMNS.items()
    )
    ways = "".join(f"<td>{escape(words)}</td>" for words in table.ergonomics.values())
    return (
        "<h2>What each supports <span class='ss-hint'>hover a mark for what asks for it</span></h2>"
        "<div class='ss-scroll' tabindex='0'><table class='ss-table ss-matrix'><thead><tr><td></td>"
        f"{head}</tr></thead><tbody>{rows}<tr class='ss-ways'><th scope='row'>in use</th>{ways}</tr></tbody>"
        "</table></div>"
    )


def _cell(supported: bool, how: str) -> str:
    mark, words, kind = ("✓", "yes", "ss-yes") if supported else ("–", "no", "ss-no")
    return f"<td class='{kind}' title='{escape(how, quote=True)}' aria-label='{words}'>{mark}</td>"
