"""The table of a search: the best plans as rows that can be sorted, paged and clicked."""

from __future__ import annotations

import re
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING

import numpy as np

import shardscope as ss
from shardscope.core.number_format import Scale, format_gib
from shardscope.memory.overheads.libraries import TIGHT_PERCENT
from shardscope.planner.search.nearest_misses import describe_other_recipe
from shardscope.records.json_values import is_int
from shardscope_widgets.kit.display_names import name_rate_unit
from shardscope_widgets.kit.numbers import format_dollars, format_short, keep_units
from shardscope_widgets.pickers.layout import LABELS, VALUE_LABELS
from shardscope_widgets.plans.feasibility import why_not_launched, why_unknown
from shardscope_widgets.plans.ranking_rows import CurrentPlan, Indices, build_signs

if TYPE_CHECKING:
    from shardscope.planner.search.ranking import Ranking

ROWS_ON_A_PAGE = 12
HEADINGS = {
    "tokens_per_second_per_gpu": "tokens/s per {device}",
    "step_seconds": "step,\N{NO-BREAK SPACE}{unit}",
    "peak_bytes": "peak,\N{NO-BREAK SPACE}GiB",
    "headroom_bytes": "free,\N{NO-BREAK SPACE}GiB",
}


def render_page(
    ranking: Ranking,
    order: Indices,
    first: int,
    column: str | None,
    ascending: bool,
    chosen: CurrentPlan | None,
) -> str:
    """Return twelve rows from ``first`` on, with sortable headings and rows that apply their plan."""
    shown = order[first : first + ROWS_ON_A_PAGE]
    # One unit for the column, that of the first row, so that the numbers can be compared.
    scale = Scale.for_seconds(float(ranking.get_step_seconds(order[:1])[0]))
    device = name_rate_unit(ranking.cluster)
    head = _render_heading("framework", "plan", column, ascending) + "<th>micro-batch</th>"
    head += "<th class='ss-text'>recompute</th>"
    head += "".join(
        _render_heading(name, label.format(unit=scale.unit, device=device), column, ascending)
        for name, label in HEADINGS.items()
    )
    cost = "$ per M tokens"
    known = ranking.cluster.price_per_hour_usd is not None
    head += _render_heading("cost_per_token", cost, column, ascending) if known else f"<th>{cost}</th>"
    rows = "".join(_render_row(ranking, int(index), scale, chosen) for index in shown)
    return (
        "<div class='ss-scroll' tabindex='0' role='region' aria-label='Plans'>"
        f"<table class='ss-table ss-ranked'><thead><tr>{head}</tr></thead>"
        f"<tbody>{rows}</tbody></table></div>{_render_pager(first, len(order))}"
    )


def _render_heading(name: str, label: str, column: str | None, ascending: bool) -> str:
    sorts, arrow = "", ""
    if name == column:
        sorts = f" aria-sort='{'ascending' if ascending else 'descending'}'"
        arrow = " ▴" if ascending else " ▾"
    kind = " class='ss-text'" if name == "framework" else ""
    # The keyboard reaches buttons, not table headings.
    button = f"<button type='button' data-act='sort:{name}'>{label}{arrow}</button>"
    return f"<th scope='col'{kind}{sorts}>{button}</th>"


def _render_row(ranking: Ranking, index: int, scale: Scale, chosen: CurrentPlan | None) -> str:
    plan = ranking.plan(index)
    sign = build_signs()[plan.layout.framework]
    row = np.array([index])
    rate = float(ranking.get_tokens_per_second_per_gpu(row)[0])
    costs = ranking.get_cost_per_token(row)
    cost = "–" if costs is None else format_dollars(1e6 * float(costs[0]))
    note = chosen.note if chosen is not None and chosen.is_row(ranking, index) else ""
    kind = " class='ss-current'" if note else ""
    # A degree and its number stay on one line.
    name = re.sub(r" (?=\d)", "\N{NO-BREAK SPACE}", escape(describe_layout(plan.layout)))
    notes = [note] if note else []
    notes += [
        f"<span title='{escape(reason, quote=True)}'>{label}</span>"
        for label, reason in (
            ("may not fit", why_unknown(ranking, index)),
            ("cannot be launched here", why_not_launched(ranking, index)),
        )
        if reason
    ]
    below = f"<div class='ss-hint'>{', '.join(notes)}</div>" if notes else ""
    mark = f"<span class='ss-sign' style='color:{sign.colour}'>{sign.text}</span>"
    return (
        # The whole row can be clicked; its button is for the keyboard and screen readers.
        f"<tr data-act='apply:{index}'{kind}><td><div class='ss-plan'>{mark} "
        f"<button type='button' data-act='apply:{index}'>{name}</button></div>{below}</td>"
        f"<td>{plan.recipe.micro_batch_size}</td>"
        f"<td class='ss-text'>{escape(str(plan.recipe.recompute))}</td><td>{format_short(rate)}</td>"
        f"<td>{scale.format(float(ranking.get_step_seconds(row)[0]))}</td><td>{format_gib(int(ranking.peak_bytes[index]))}</td>"
        f"{_render_free(ranking, index)}<td>{cost}</td></tr>"
    )


def _render_free(ranking: Ranking, index: int) -> str:
    """Return the cell with the GiB that a plan leaves free, marked as in the verdict if it is tight."""
    free = format_gib(int(ranking.headroom_bytes[index]))
    if not ranking.is_tight[index]:
        return f"<td>{free}</td>"
    why = f"Tight: of runs that need over {TIGHT_PERCENT} % of the memory some run out of it"
    mark = f"<span class='ss-tight'><span aria-hidden='true'>!</span><span class='ss-off-screen'>{why}</span>"
    return f"<td title='{why}'>{mark} {free}</span></td>"


def describe_layout(layout: ss.Layout) -> str:
    """Return ``Megatron-core tp 4 pp 4, sequence parallel off``: framework and non-default options."""
    plain = type(layout)()
    numbers, switches = [], []
    for name, values in layout.choices.items():
        value = getattr(layout, name)
        is_number = is_int(value)
        # A number whose "none" is a value as well, such as ZeRO's stage, is always shown.
        is_shown = is_number and values is not None and None not in values
        if value is None or (value == getattr(plain, name) and not is_shown) or name.startswith("offload"):
            continue
        if is_number:
            numbers.append(f"{name} {value}")
        elif not (name == "sequence_parallel" and value == plain_sequence(layout)):
            switches.append(
                f"{LABELS.get(name, name).lower()} {VALUE_LABELS.get(name, {}).get(value, value)}"
            )
    return ", ".join([" ".join([layout.title, *numbers]), *switches, *layout.offloaded])


def plain_sequence(layout: ss.Layout) -> bool:
    """Return the default of sequence parallelism: enabled with tensor parallelism."""
    return bool(replace(layout, sequence_parallel=None).splits_sequence)  # type: ignore[call-arg]


def _render_pager(first: int, number: int) -> str:
    if number <= ROWS_ON_A_PAGE:
        return ""
    last = min(first + ROWS_ON_A_PAGE, number)
    buttons = "".join(
        f"<button type='button' class='ss-act' data-act='page:{move}'{' disabled' * is_off}>{label}</button>"
        for move, label, is_off in ((-1, "Previous", first == 0), (1, "Next", last == number))
    )
    return f"<div class='ss-pager'>{buttons}<span>{first + 1:,} to {last:,} of {number:,} plans</span></div>"


def render_misses(ranking: Ranking) -> str:
    """Return the nearest misses of a search in which nothing fits, with what each lacks."""
    rows = "".join(
        f"<li><div>{escape(keep_units(miss.text))}</div><button type='button' class='ss-act'"
        f" data-act='apply:{miss.index}' aria-label='{escape(f'Apply {miss.text}', quote=True)}'>"
        "Apply</button></li>"
        for miss in ranking.misses
    )
    other = describe_other_recipe(ranking)
    if ranking.alternative is not None:
        # The nearest other recipe may not fit either: then there is nothing to apply.
        applied = ranking.alternative.num_feasible > 0
        label = escape(f"Apply: {other}", quote=True)
        button = (
            f"<button type='button' class='ss-act' data-act='alternative' aria-label='{label}'>Apply</button>"
        )
        rows += f"<li><div>{escape(other)}</div>{button if applied else ''}</li>"
    head = "<h2>Nothing fits <span class='ss-hint'>the nearest plans</span></h2>"
    return f"{head}<ul class='ss-offers'>{rows}</ul>"


def render_refusals(ranking: Ranking) -> str:
    """Return why frameworks are absent from the chart and why plans come last in the table."""
    titles = build_signs()
    rows = f"<div>{escape(ranking.unknown_memory)}</div>" if ranking.unknown_memory else ""
    rows += "".join(
        f"<div><b>{titles[name].title}</b>: {escape(why)}</div>" for name, why in ranking.refused.items()
    )
    return f"<div class='ss-hint ss-refused'>{rows}</div>" if rows else ""
