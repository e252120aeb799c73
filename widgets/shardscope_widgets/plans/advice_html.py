"""The advice as HTML: recommendation, alternatives, decision path, and a table of framework abilities."""

from __future__ import annotations

from html import escape as escape_text

from shardscope.planner.abilities import COLUMNS, Abilities
from shardscope.planner.advice.advice import Advice, Turn
from shardscope_widgets.kit.numbers import keep_units
from shardscope_widgets.plans.advice_choice import Alternative, Answer


def escape_with_units(text: str) -> str:
    """Return ``text`` as HTML, with numbers and their units on one line."""
    return escape_text(keep_units(text), quote=True)


def render_applied(name: str) -> str:
    """Return which plan was applied last, and where it is in Python; empty for none."""
    if not name:
        return ""
    return (
        f"<p role='status'>Applied: {escape_with_units(name)}. The view's <code>plan</code> is this one.</p>"
    )


def render_recommendation(answer: Answer) -> str:
    """Return the recommended plan in one sentence, its figures, and the button that applies it."""
    button = ""
    if answer.plan is not None:
        label = escape_with_units(f"Apply {answer.plan.layout.description}")
        button = (
            "<button type='button' class='ss-act ss-first' data-act='plan'"
            f" aria-label='{label}'>Apply</button>"
        )
    lines = f"<p><b>{escape_with_units(answer.sentence)}</b></p>"
    if answer.figures:
        lines += f"<p class='ss-number'>{escape_with_units(answer.figures)}</p>"
    if answer.change:
        lines += f"<p class='ss-number'>{escape_with_units(answer.change)}</p>"
    if answer.caution:
        lines += f"<p class='ss-tight'>{escape_with_units(answer.caution)}</p>"
    return f"<div class='ss-advised'><div>{lines}</div>{button}</div>"


def render_alternatives(alternatives: tuple[Alternative, ...], *, nothing_fits: bool) -> str:
    """Return the alternatives, each with its benefits and costs or what it lacks, and an apply button."""
    if not alternatives:
        return ""
    rows = "".join(
        f"<li><div>{escape_with_units(alternative.words)}</div>"
        f"<button type='button' class='ss-act' data-act='{alternative.index}' aria-label='"
        f"{escape_with_units(f'Apply: {alternative.name}')}'>Apply</button>"
        "</li>"
        for alternative in alternatives
    )
    title = "Nearest plans" if nothing_fits else "Alternatives"
    return f"<h2>{title}</h2><ul class='ss-offers'>{rows}</ul>"


def render_path(advice: Advice, answer: Answer) -> str:
    """Return the questions in order, collapsed; those whose answer the plan does not follow are dimmed."""
    steps = "".join(_render_turn(turn) for turn in advice.path)
    number = len(advice.path)
    why = f"<p>{escape_with_units(answer.why)}</p>" if answer.why else ""
    return (
        # By its key the page keeps it open when the advice is drawn again (clickable.js).
        "<details class='ss-fold' data-key='why'>"
        f"<summary>Why: {number} decision{'s' * (number != 1)}</summary>"
        f"{why}<ol class='ss-path'>{steps}</ol></details>"
    )


def _render_turn(turn: Turn) -> str:
    kind, state = ("ss-taken", "taken") if turn.taken else ("ss-passed", "not taken")
    number = f"<div class='ss-number'>{escape_with_units(turn.number)}</div>" if turn.number else ""
    return (
        # Screen readers do not see which turns are dimmed.
        f"<li class='{kind}'><span class='ss-off-screen'>{state}: </span>"
        f"<div>{escape_with_units(turn.question)} "
        f"<b>{escape_with_units(turn.answer)}</b></div>{number}"
        f"<div class='ss-hint'>{escape_with_units(turn.why)}</div></li>"
    )


_MATRIX_TITLE = "What can be planned with each framework"
"""Title of the table of abilities. Frameworks can do more than has formulas here."""


def render_matrix(table: Abilities) -> str:
    """Return the abilities of each framework as a collapsed table, whose tooltips name the options."""
    head = "".join(f"<th scope='col'>{escape_with_units(title)}</th>" for title in table.titles.values())
    rows = "".join(
        f"<tr><th scope='row' title='{escape_with_units(column.description)}'>"
        f"{escape_with_units(column.title)}</th>"
        + "".join(_render_cell(row[key].supported, row[key].how) for row in table.cells.values())
        + "</tr>"
        for key, column in COLUMNS.items()
    )
    ways = "".join(f"<td>{escape_with_units(usage)}</td>" for usage in table.ergonomics.values())
    return (
        f"<details class='ss-fold' data-key='support'><summary>{_MATRIX_TITLE}</summary>"
        f"<div class='ss-scroll' tabindex='0' role='region' aria-label='{_MATRIX_TITLE}'>"
        f"<table class='ss-table ss-matrix'><thead><tr><td></td>{head}</tr></thead><tbody>{rows}"
        f"<tr class='ss-ways'><th scope='row'>how it is used</th>{ways}</tr></tbody></table></div></details>"
    )


def _render_cell(supported: bool, how: str) -> str:
    mark, label, kind = ("✓", "yes", "ss-yes") if supported else ("–", "no", "ss-no")
    return f"<td class='{kind}' title='{escape_with_units(how)}' aria-label='{label}'>{mark}</td>"
