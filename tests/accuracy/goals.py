"""The head of docs/accuracy.md: goals, judged by the product alone and with foreign code described."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import NamedTuple

from tests.accuracy.measurement_kinds import find_kind
from tests.accuracy.scoring import Fit, MemoryScore, Scored, overall_line, summarize_groups

from shardscope.memory.overheads.libraries import TIGHT_PERCENT

WIDE = 1.5
"""A band whose top is more times its bottom than this says little."""
KINDS = ("allocated", "reserved", "nvidia-smi", "unknown")


class Goal(NamedTuple):
    """One line of the table: a figure of some rows, which the goal bounds."""

    what: str
    rows: tuple[Scored, ...]
    figure: Callable[[tuple[Scored, ...]], str]
    is_met: Callable[[tuple[Scored, ...]], bool] | None = None
    goal: str = "none"


def goals_report(score: MemoryScore) -> str:
    """The goals, fits-or-not, signs and widths of bands."""
    return "\n\n".join(
        part
        for part in (
            _format_both_scores(score),
            _format_goals(score),
            _format_fits(score),
            _format_signs(score),
            _format_widths(score),
        )
        if part
    )


def alone_line(score: MemoryScore) -> str:
    """The closing line's figures by ``plan.memory()`` and nothing else."""
    return overall_line(score.by_product).replace("overall memory:", "plan.memory() alone:", 1)


def _format_both_scores(score: MemoryScore) -> str:
    described = sum(row.is_described for row in score.scored)
    return (
        "Every row is scored twice: by `plan.memory()` **alone**, which is the product, and with what ran "
        "beside the plan **described** from its published code. That is so for "
        f"{described} of the {len(score.scored)} rows: kernels, hooks and optimizers of a source's own "
        "(`tests/accuracy/own_code.py`) and nanotron's own modules (`tests/accuracy/nanotron.py`). No user "
        "of Shardscope gets the second; it shows how much of an error is foreign code. The closing line of "
        "this file is the second's, the line above it the first's."
    )


def exact_goals(rows: tuple[Scored, ...]) -> bool:
    """Return whether the medians and the 90th percentile of point errors are within 3 % and 8 %."""
    summaries = summarize_groups(MemoryScore(rows, (), (), len(rows)).groups)
    return summaries is not None and summaries[0] <= 0.03 and summaries[1] <= 0.08


def compute_share_inside(rows: tuple[Scored, ...]) -> float:
    """Return the share of rows in their band."""
    return sum(row.inside for row in rows) / len(rows)


def _format_point(rows: tuple[Scored, ...]) -> str:
    summaries = summarize_groups(MemoryScore(rows, (), (), len(rows)).groups)
    return f"{100 * summaries[0]:.1f} %, p90 {100 * summaries[1]:.1f} %" if summaries else ""


def _format_share_inside(rows: tuple[Scored, ...]) -> str:
    return f"{100 * compute_share_inside(rows):.0f} % inside"


def _format_goals(score: MemoryScore) -> str:
    lines = [
        "## Against the goals",
        "",
        "Every figure with its verdict; a goal is reached only where the first column says so.",
        "",
        "| what | rows | described | plan.memory() alone | with what ran beside it described | goal |",
        "|---|---|---|---|---|---|",
    ]
    for goal in _all_goals(score):
        described = sum(row.is_described for row in goal.rows)
        lines.append(
            f"| {goal.what} | {len(goal.rows)} | {described} | "
            f"{_format_cell(goal, tuple(row.by_product for row in goal.rows))} | "
            f"{_format_cell(goal, goal.rows) if described else 'the same'} | {goal.goal} |"
        )
    known = [why for _, why in score.unmapped if not why.endswith("is not modelled")]
    of_known = score.num_rows - len(score.unmapped) + len(known)
    if of_known:
        share = 1 - len(known) / of_known
        lines.append(
            f"| rows of known frameworks with a plan | {of_known} | – | {100 * share:.0f} %, "
            f"{_format_verdict(share >= 0.8)} | the same | 80 % |"
        )
    return "\n".join(lines)


def _all_goals(score: MemoryScore) -> list[Goal]:
    by_kind = {
        name: tuple(row for row in score.scored if find_kind(row.mapped.row) == name) for name in KINDS
    }
    goals: list[Goal] = []
    exact = by_kind["allocated"]
    if exact:
        what = "allocated and active: median of source medians"
        goals.append(Goal(what, exact, _format_point, exact_goals, "3 %, p90 8 %"))
        plain = tuple(row for row in exact if not row.is_described)
        if plain and len(plain) < len(exact):
            goals.append(Goal("the same, rows with nothing beside the plan", plain, _format_point))
    for name in ("reserved", "nvidia-smi"):
        if by_kind[name]:
            goals.append(
                Goal(
                    name,
                    by_kind[name],
                    _format_share_inside,
                    lambda rows: compute_share_inside(rows) >= 0.8,
                    "80 % inside",
                )
            )
            ours = tuple(row for row in by_kind[name] if row.mapped.framework != "nanotron")
            if ours and len(ours) < len(by_kind[name]):
                what = f"{name}, without nanotron, which the product has no layout for"
                goals.append(Goal(what, ours, _format_share_inside))
            plain = tuple(row for row in by_kind[name] if not row.is_described)
            if plain and len(plain) < len(by_kind[name]):
                goals.append(Goal(f"{name}, rows with nothing beside the plan", plain, _format_share_inside))
    if by_kind["unknown"]:
        goals.append(Goal("unknown what was read", by_kind["unknown"], _format_share_inside))
    return goals


def _format_cell(goal: Goal, rows: tuple[Scored, ...]) -> str:
    return goal.figure(rows) + (f": {_format_verdict(goal.is_met(rows))}" if goal.is_met else "")


def _format_verdict(is_met: bool) -> str:
    return "reached" if is_met else "**missed**"


def _format_fits(score: MemoryScore) -> str:
    if not score.fits:
        return ""
    constant = sum(fit.ran for fit in score.fits) / len(score.fits)
    out = len(score.fits) - sum(fit.ran for fit in score.fits)
    lines = [
        "## Fits or not",
        "",
        f"Of {len(score.fits)} rows that say whether they ran, {out} ran out of memory. Answering "
        f'"fits" to every one would be right for {100 * constant:.1f} %: the rate says little, the rows that '
        "ran out say something.",
        "",
        "| by | rows | right (goal 98 %) | ran out and caught | ran, and said not to fit |",
        "|---|---|---|---|---|",
    ]
    others = tuple(fit for fit in score.fits if fit.mapped.framework != "nanotron")
    for name, fits in (
        ("plan.memory() alone", score.by_product.fits),
        ("with what ran beside it described", score.fits),
        ('always "fits"', tuple(fit._replace(predicted=True) for fit in score.fits)),
        ("plan.memory() alone, without nanotron", tuple(fit._replace(predicted=fit.alone) for fit in others)),
    ):
        if fits:
            lines.append(f"| {name} | {_fit_figures(fits)} |")
    warned = sum(fit.warned and not fit.ran for fit in score.fits)
    lines += [
        "",
        f"Beside that plan.memory() calls a plan tight whose peak is over {TIGHT_PERCENT} % of its card "
        f"(`is_tight`): of the {out} that ran out it warned of {warned} in one way or the other, and of "
        f"{sum(fit.warned and fit.ran for fit in score.fits)} of the {len(score.fits) - out} that ran.",
    ]
    return "\n".join(lines)


def _fit_figures(fits: tuple[Fit, ...]) -> str:
    right = sum(fit.ran == fit.predicted for fit in fits)
    out = [fit for fit in fits if not fit.ran]
    caught = sum(not fit.predicted for fit in out)
    wrongly = sum(fit.ran and not fit.predicted for fit in fits)
    return f"{len(fits)} | {100 * right / len(fits):.1f} % | {caught} of {len(out)} | {wrongly}"


def _format_signs(score: MemoryScore) -> str:
    lines = [
        "## Signs",
        "",
        "How many points lie under the measured figure and how many over it: a prediction that is mostly "
        "under says that plans fit which do not.",
        "",
        "| kind | rows | alone: under | alone: over | alone: median | described: under | described: over | "
        "described: median |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in KINDS:
        rows = [row for row in score.scored if find_kind(row.mapped.row) == name]
        if rows:
            both = (_format_sign([row.by_product for row in rows]), _format_sign(rows))
            lines.append(f"| {name} | {len(rows)} | {both[0]} | {both[1]} |")
    return "\n".join(lines)


def _format_sign(rows: list[Scored]) -> str:
    under = sum(row.error < 0 for row in rows)
    over = sum(row.error > 0 for row in rows)
    return f"{under} | {over} | {100 * median(row.error for row in rows):+.1f} %"


def _format_widths(score: MemoryScore) -> str:
    lines = [
        "## Widths of bands",
        "",
        f"A wide band holds its row easily: shares inside are told apart for bands whose top is more than "
        f"{WIDE} times their bottom.",
        "",
        f"| kind | by | rows | median width | wider than {WIDE} times | inside, of the wide | inside, of the "
        "narrow |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in ("reserved", "nvidia-smi", "unknown"):
        rows = tuple(row for row in score.scored if find_kind(row.mapped.row) == name)
        alone = tuple(row.by_product for row in rows)
        for by, some in (("alone", alone), ("described", rows)):
            if some and (by == "alone" or any(row.is_described for row in rows)):
                lines.append(f"| {name} | {by} | {_format_width(some)} |")
    return "\n".join(lines)


def _format_width(rows: tuple[Scored, ...]) -> str:
    ratios = [row.predicted.high / row.predicted.low for row in rows]
    wide = tuple(row for row, ratio in zip(rows, ratios, strict=True) if ratio > WIDE)
    narrow = tuple(row for row, ratio in zip(rows, ratios, strict=True) if ratio <= WIDE)
    shares = [f"{sum(row.inside for row in some)} of {len(some)}" for some in (wide, narrow)]
    share = len(wide) / len(rows)
    return f"{len(rows)} | {median(ratios):.2f} | {100 * share:.0f} % | {shares[0]} | {shares[1]}"
