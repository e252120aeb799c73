"""docs/leaderboard.md, which starts with the tables in which another estimator is better."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tests.leaderboard.estimators import Answers, Estimator
from tests.leaderboard.ranking import (
    Comparison,
    Score,
    Standing,
    compute_score,
    find_common_rows,
    rank_estimator,
)
from tests.leaderboard.tables import Table

OURS = "Shardscope"
_HOW = """\
Public estimators that can be installed are compared with Shardscope on the same rows. Each one's own code
runs in an environment of its own (`tests/leaderboard/adapters`). An error is estimate / measured - 1; medians
and 90th percentiles are of absolute errors. `under` is the share of estimates below the measured figure: such
an estimate may let a plan pass that does not fit. A plan that an estimator cannot express has no estimate and
is counted as such; no input is guessed. The estimators support different plans, so each one is compared with
Shardscope on the rows that it estimates (the columns `Shardscope`), and then all of them on the rows that
they have in common. Shardscope's estimates are `plan.memory()` and `plan.step()` alone."""
_COLUMNS = (
    "| estimator | estimated | no estimate | median | Shardscope | p90 | Shardscope | under | Shardscope | "
    "rows closer than Shardscope |"
)


def write_page(
    tables: Sequence[Table], estimators: Sequence[Estimator], answers: Mapping[str, Answers]
) -> str:
    """Return the page. An estimator without answers is listed as not run."""
    asked = [estimator for estimator in estimators if estimator.name in answers]
    ranked = {
        table.title: [rank_estimator(one.name, table, answers[one.name]) for one in asked] for table in tables
    }
    standings = [standing for table in tables for standing in ranked[table.title]]
    parts = [
        "# Estimators compared",
        _describe_wins(one.whole for one in standings if one.whole),
        "Written by `make leaderboard`; do not edit.",
        _HOW,
        _list_contents(tables, asked),
        _list_group_wins([one for standing in standings for one in standing.groups if one.is_win]),
        *(_format_table(table, ranked[table.title]) for table in tables),
        _describe_estimators(estimators, answers),
        *(_list_refusals(one.name, ranked) for one in asked),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def make_anchor(heading: str) -> str:
    """Return GitHub's anchor of a heading."""
    return "".join(sign for sign in heading.lower() if sign.isalnum() or sign in " -_").replace(" ", "-")


def _describe_wins(comparisons: Iterable[Comparison]) -> str:
    wins = [
        f"{one.name} in “{one.where}” ({one.theirs.num_rows} rows: "
        f"median {_percent(one.theirs.median)} against {_percent(one.ours.median)}, "
        f"p90 {_percent(one.theirs.p90)} against {_percent(one.ours.p90)})"
        for one in comparisons
        if one.is_win
    ]
    if not wins:
        return f"No other estimator is better than {OURS} in a whole table, by median or 90th percentile."
    return f"**Better than {OURS}, by median or p90 on the rows that they estimate:** {'; '.join(wins)}."


def _list_contents(tables: Sequence[Table], asked: Sequence[Estimator]) -> str:
    titles = [table.title for table in tables]
    titles += ["The estimators", *(_format_refusal_heading(one.name) for one in asked)]
    return "\n".join(f"- [{title}](#{make_anchor(title)})" for title in titles)


def _list_group_wins(wins: Sequence[Comparison]) -> str:
    if not wins:
        return ""
    lines = [
        f"Single sources for which another estimator is better than {OURS}:",
        "",
        "| estimator | table, source | rows | median | Shardscope | p90 | Shardscope |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in wins:
        theirs, ours = one.theirs, one.ours
        lines.append(
            f"| {one.name} | {one.where} | {theirs.num_rows} | {_percent(theirs.median)} | "
            f"{_percent(ours.median)} | {_percent(theirs.p90)} | {_percent(ours.p90)} |"
        )
    return "\n".join(lines)


def _format_table(table: Table, standings: Sequence[Standing]) -> str:
    whole = compute_score([row.ours for row in table.rows], table.rows)
    lines = [
        f"## {table.title}\n\n{table.text}\n\n{_COLUMNS}\n|---|---|---|---|---|---|---|---|---|---|",
        f"| {OURS} | {whole.num_rows} | 0 | {_percent(whole.median)} | | {_percent(whole.p90)} | | "
        f"{_percent(whole.under, 0)} | | |",
    ]
    for one in sorted(standings, key=lambda standing: -len(standing.estimates)):
        cells = [one.name, str(len(one.estimates)), str(one.refusals.total()), *["–"] * 7]
        if one.whole:
            pair = (one.whole.theirs, one.whole.ours)
            cells[3:] = [_percent(score.median) for score in pair] + [_percent(score.p90) for score in pair]
            cells += [_percent(score.under, 0) for score in pair] + [str(one.whole.nearer)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", _format_common(table, standings)])


def _format_common(table: Table, standings: Sequence[Standing]) -> str:
    some = [standing for standing in standings if standing.estimates]
    rows = find_common_rows(table, standings)
    if len(some) < 2 or not rows:
        return "No row in common: that takes two or more other estimators, all with an estimate for it."
    scores: dict[str, Score] = {OURS: compute_score([row.ours for row in rows], rows)}
    for one in some:
        scores[one.name] = compute_score([one.estimates[row.plan] for row in rows], rows)
    text = "; ".join(
        f"{name} {_percent(score.median)} (p90 {_percent(score.p90)}, under {_percent(score.under, 0)})"
        for name, score in sorted(scores.items(), key=lambda item: item[1].median)
    )
    return f"On the {len(rows)} rows in common, by median: {text}."


def _describe_estimators(estimators: Sequence[Estimator], answers: Mapping[str, Answers]) -> str:
    lines = [
        "## The estimators",
        "",
        "| estimator | version | function and inputs |",
        "|---|---|---|",
    ]
    for one in estimators:
        version = answers[one.name].version if one.name in answers else "not run"
        lines.append(f"| {one.name} | {version} | {one.text} |")
    return "\n".join(lines)


def _format_refusal_heading(name: str) -> str:
    return f"Rows without an estimate by {name}"


def _list_refusals(name: str, ranked: Mapping[str, Sequence[Standing]]) -> str:
    lines = [f"## {_format_refusal_heading(name)}", "", "| table | rows | reason |", "|---|---|---|"]
    for title, standings in ranked.items():
        refusals = next(one.refusals for one in standings if one.name == name)
        lines += [f"| {title} | {num_rows} | {reason} |" for reason, num_rows in refusals.most_common()]
    return "\n".join(lines)


def _percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"
