"""The first sections of docs/accuracy.md: goals, fit predictions, signs of errors and widths of bands."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import NamedTuple

from tests.accuracy.measurement_kinds import find_kind
from tests.accuracy.scoring import Fit, MemoryScore, Scored, overall_line, summarize_groups

from shardscope.memory.overheads.libraries import TIGHT_PERCENT

WIDE = 1.5
"""Ratio of a band's upper to its lower end above which it counts as wide."""
PRODUCT = "product"
"""Label of predictions by ``plan.memory()`` alone."""
WITH_CODE = "with publisher's code"
"""Label of predictions that add the code that a publisher ran."""
KINDS = ("allocated", "reserved", "nvidia-smi", "unknown")


class Goal(NamedTuple):
    """One line of the table: a figure of some rows, and the goal for it."""

    name: str
    rows: tuple[Scored, ...]
    figure: Callable[[tuple[Scored, ...]], str]
    is_met: Callable[[tuple[Scored, ...]], bool] | None = None
    goal: str = "none"


def goals_report(score: MemoryScore) -> str:
    """Return the sections about goals, fit predictions, signs of errors and widths of bands."""
    return "\n\n".join(
        part
        for part in (
            _explain_both_predictions(score),
            _format_goals(score),
            _format_fits(score),
            _format_signs(score),
            _format_widths(score),
        )
        if part
    )


def product_line(score: MemoryScore) -> str:
    """Return the figures of the last line, by ``plan.memory()`` alone."""
    return overall_line(score.by_product).replace("overall memory:", "plan.memory() alone:", 1)


def _explain_both_predictions(score: MemoryScore) -> str:
    with_code = sum(row.has_publisher_code for row in score.scored)
    return (
        f"Every row has two predictions. **{PRODUCT.capitalize()}** is `plan.memory()` alone, which users "
        f"get. **{WITH_CODE.capitalize()}** adds a model of the kernels, hooks and optimizers that the "
        "publisher ran and that no plan can express (`tests/accuracy/own_code.py`), or nanotron's modules "
        f"(`tests/accuracy/nanotron.py`). The two differ for {with_code} of the {len(score.scored)} rows; "
        "the difference shows how much of an error comes from code that is not part of Shardscope. The last "
        "line of this part has the figures with the publisher's code, the line above it those of the product."
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
        "A goal counts as reached only if `plan.memory()` alone reaches it. `inside` is the share of rows "
        "whose measured figure lies in the predicted band.",
        "",
        f"| measurement | rows | rows with publisher's code | plan.memory() alone | {WITH_CODE} | goal |",
        "|---|---|---|---|---|---|",
    ]
    for goal in _all_goals(score):
        with_code = sum(row.has_publisher_code for row in goal.rows)
        lines.append(
            f"| {goal.name} | {len(goal.rows)} | {with_code} | "
            f"{_format_cell(goal, tuple(row.by_product for row in goal.rows))} | "
            f"{_format_cell(goal, goal.rows) if with_code else 'the same'} | {goal.goal} |"
        )
    known = [why for _, why in score.unmapped if not why.endswith("is not modelled")]
    of_known = score.num_rows - len(score.unmapped) + len(known)
    if of_known:
        share = 1 - len(known) / of_known
        lines.append(
            f"| rows of known frameworks that map to a plan | {of_known} | – | {100 * share:.0f} %, "
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
        title = "allocated and active: median of source medians"
        goals.append(Goal(title, exact, _format_point, exact_goals, "3 %, p90 8 %"))
        plain = tuple(row for row in exact if not row.has_publisher_code)
        if plain and len(plain) < len(exact):
            goals.append(Goal("the same, rows without publisher's code", plain, _format_point))
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
                title = f"{name}, without nanotron, for which Shardscope has no layout"
                goals.append(Goal(title, ours, _format_share_inside))
            plain = tuple(row for row in by_kind[name] if not row.has_publisher_code)
            if plain and len(plain) < len(by_kind[name]):
                goals.append(Goal(f"{name}, rows without publisher's code", plain, _format_share_inside))
    if by_kind["unknown"]:
        goals.append(Goal("unknown kind of measurement", by_kind["unknown"], _format_share_inside))
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
        "## Fits or out of memory",
        "",
        f"{len(score.fits)} rows state whether the run fitted; {out} of them ran out of memory. Predicting "
        f'"fits" for every row would be right for {100 * constant:.1f} %, so the rate alone means little: '
        "the rows that ran out of memory are the test.",
        "",
        "| predicted by | rows | right (goal 98 %) | out of memory, predicted | ran, predicted not to fit |",
        "|---|---|---|---|---|",
    ]
    others = tuple(fit for fit in score.by_product.fits if fit.mapped.framework != "nanotron")
    for name, fits in (
        ("plan.memory() alone", score.by_product.fits),
        (WITH_CODE, score.fits),
        ('always "fits"', tuple(fit._replace(predicted=True) for fit in score.fits)),
        ("plan.memory() alone, without nanotron", others),
    ):
        if fits:
            lines.append(f"| {name} | {_fit_figures(fits)} |")
    warned = sum(fit.warned and not fit.ran for fit in score.fits)
    lines += [
        "",
        f"`plan.memory()` also calls a plan tight (`is_tight`) if its peak is above {TIGHT_PERCENT} % of the "
        f"GPU's usable memory. {warned} of the {out} runs that ran out of memory are predicted as tight or "
        f"too large, and {sum(fit.warned and fit.ran for fit in score.fits)} of the "
        f"{len(score.fits) - out} that fitted.",
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
        "## Signs of the errors",
        "",
        "How many predictions are below (under) and above (over) the measured figure, and the median signed "
        "error. Predictions that are mostly under let plans pass that do not fit.",
        "",
        f"| kind | rows | {PRODUCT}: under | over | median | {WITH_CODE}: under | over | median |",
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
        "The width of a band is its upper end divided by its lower end. A wide band contains its row easily, "
        f"so bands wider than {WIDE} are counted separately.",
        "",
        f"| kind | predicted by | rows | median width | wider than {WIDE} | inside, wide bands | inside, "
        "narrow bands |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in ("reserved", "nvidia-smi", "unknown"):
        rows = tuple(row for row in score.scored if find_kind(row.mapped.row) == name)
        by_product = tuple(row.by_product for row in rows)
        for by, some in ((PRODUCT, by_product), (WITH_CODE, rows)):
            if some and (by == PRODUCT or any(row.has_publisher_code for row in rows)):
                lines.append(f"| {name} | {by} | {_format_width(some)} |")
    return "\n".join(lines)


def _format_width(rows: tuple[Scored, ...]) -> str:
    ratios = [row.predicted.high / row.predicted.low for row in rows]
    wide = tuple(row for row, ratio in zip(rows, ratios, strict=True) if ratio > WIDE)
    narrow = tuple(row for row, ratio in zip(rows, ratios, strict=True) if ratio <= WIDE)
    shares = [f"{sum(row.inside for row in some)} of {len(some)}" for some in (wide, narrow)]
    share = len(wide) / len(rows)
    return f"{len(rows)} | {median(ratios):.2f} | {100 * share:.0f} % | {shares[0]} | {shares[1]}"
