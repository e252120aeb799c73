"""The advice as HTML: recommendation, alternatives, decision path, and a table of framework abilities."""

from __future__ import annotations

from html import escape as escape_text

from shardscope.planner.abilities import COLUMNS, Abilities
from shardscope.planner.advice.advice import Advice, Turn
from shardscope_widgets.kit.numbers import keep_units
from shardscope_widgets.plans.advice_choice import Alternative, Answer


def escape(text: str, *, quote: bool = True) -> str:
    """Return ``text`` as HTML, with numbers and their units on one line."""
    return escape_text(keep_units(text), quote=quote)


def recommendation(answer: Answer) -> str:
    """Return the recommended plan in one sentence, its figures, and the button that applies it."""
    button = ""
    if answer.plan is not None:
        label = escape(f"Apply {answer.plan.layout.description}", quote=True)
        button = (
            "<button type='button' class='ss-act ss-first' data-act='plan'"
            f" aria-label='{label}'>Apply</button>"
        )
    lines = f"<p><b>{escape(answer.sentence)}</b></p>"
    if answer.figures:
        lines += f"<p class='ss-number'>{escape(answer.figures)}</p>"
    if answer.change:
        lines += f"<p class='ss-number'>{escape(answer.change)}</p>"
    return f"<div class='ss-advised'><div>{lines}</div>{button}</div>"


def alternatives(found: tuple[Alternative, ...], *, nothing_fits: bool) -> str:
    """Return the alternatives, each with its benefits and costs or what it lacks, and an apply button."""
    if not found:
        return ""
    rows = "".join(
        f"<li><div>{escape(one.words)}</div><button type='button' class='ss-act' data-act='{one.index}'"
        f" aria-label='{escape(f'Apply {one.plan.layout.description}', quote=True)}'>Apply</button></li>"
        for one in found
    )
    title = "Nearest plans" if nothing_fits else "Alternatives"
    return f"<h2>{title}</h2><ul class='ss-offers'>{rows}</ul>"


def path(advice: Advice, answer: Answer) -> str:
    """Return the questions in order, collapsed; those whose answer the plan does not follow are dimmed."""
    steps = "".join(_turn(turn) for turn in advice.path)
    number = len(advice.path)
    why = f"<p>{escape(answer.why)}</p>" if answer.why else ""
    return (
        "<details class='ss-fold' data-key='why'>"
        f"<summary>Why? {number} question{'s' * (number != 1)}</summary>"
        f"{why}<ol class='ss-path'>{steps}</ol></details>"
    )


def _turn(turn: Turn) -> str:
    kind, state = ("ss-taken", "taken") if turn.taken else ("ss-passed", "not taken")
    number = f"<div class='ss-number'>{escape(turn.number)}</div>" if turn.number else ""
    return (
        f"<li class='{kind}'><span class='ss-off-screen'>{state}: </span>"
        f"<div class='ss-question'>{escape(turn.question)} <b>{escape(turn.answer)}</b></div>{number}"
        f"<div class='ss-hint'>{escape(turn.why)}</div></li>"
    )


def matrix(table: Abilities) -> str:
    """Return the abilities of each framework as a collapsed table, whose tooltips name the options."""
    head = "".join(f"<th scope='col'>{escape(title)}</th>" for title in table.titles.values())
    rows = "".join(
        f"<tr><th scope='row' title='{escape(column.words, quote=True)}'>{escape(column.title)}</th>"
        + "".join(_cell(row[key].supported, row[key].how) for row in table.cells.values())
        + "</tr>"
        for key, column in COLUMNS.items()
    )
    ways = "".join(f"<td>{escape(words)}</td>" for words in table.ergonomics.values())
    return (
        "<details class='ss-fold' data-key='support'><summary>What each framework supports</summary>"
        "<div class='ss-scroll' tabindex='0' role='region' aria-label='What each framework supports'>"
        f"<table class='ss-table ss-matrix'><thead><tr><td></td>{head}</tr></thead><tbody>{rows}"
        f"<tr class='ss-ways'><th scope='row'>in use</th>{ways}</tr></tbody></table></div></details>"
    )


def _cell(supported: bool, how: str) -> str:
    mark, words, kind = ("✓", "yes", "ss-yes") if supported else ("–", "no", "ss-no")
    return f"<td class='{kind}' title='{escape(how, quote=True)}' aria-label='{words}'>{mark}</td>"
