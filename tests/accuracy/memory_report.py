"""The part of docs/accuracy.md about memory: errors by source, framework and component."""

from __future__ import annotations

from collections import defaultdict
from statistics import correlation, median

from tests.accuracy.ablation import ablation_report
from tests.accuracy.error_reasons import find_reason
from tests.accuracy.goals import PRODUCT, WITH_CODE, goals_report, product_line
from tests.accuracy.nvidia_smi_pairs import pairs_report
from tests.accuracy.row_counts import ASSUMPTIONS, counted_table
from tests.accuracy.rows import read_source
from tests.accuracy.scoring import (
    MemoryScore,
    Scored,
    compute_percentile,
    format_gib,
    has_publisher_code,
    overall_line,
    predict_row,
    sort_absolute_errors,
)

from shardscope.memory.report import COMPONENTS

_HOW = """Predictions are compared with published measurements of other projects (`tests/measured`, rows of
quality A). Each row is mapped to a plan by the options that it states; of nanotron's rows a fixed sample of
150 is used. The kind of measurement decides which predicted bytes are compared: `allocated` and `active`
figures with the tensors, `reserved` ones with the tensors and the allocator's fragmentation, `nvidia-smi`
ones with the whole prediction. `unknown` figures are compared with the tensors, and their band ends at the
whole prediction. An error is predicted / measured - 1. Medians and p90 are of absolute errors of the point
prediction, also where it has a band. Megatron-Bridge's figures are read as decimal GB, which its log prints,
whatever its pages call them (`tests/accuracy/measurement_kinds.py`). FMS-acceleration's runs appear twice:
with torch's allocated bytes and with nvidia-smi's.

Constants may be fitted on rows of role `calibration`. Rows of role `judge` are held out; "Publisher's code,
piece by piece" names the exceptions. nanotron is not a framework of Shardscope:
`tests/accuracy/nanotron.py` models its first stage from its source, and `calibration` rows decided two points
that the source leaves open (which stage takes a block at a tie, and how much memory may stay reserved).
`calibration` rows decided one more: whether Megatron-Bridge's Moonlight runs keep fp32 weights and gradients
besides the fp8 ones. They do not."""


def memory_report(score: MemoryScore, *sections: str) -> str:
    """Return the part as Markdown; ``sections`` are those about rehearsals and our own runs."""
    parts = [
        "# How accurate the predictions are",
        "Written by `make accuracy`; do not edit.",
        _HOW,
        goals_report(score),
        _by_source(score),
        _by_framework(score),
        _by_component(score),
        pairs_report(score.scored),
        *sections,
        _format_worst(score),
        _format_fits(score),
        ablation_report(score.scored),
        _format_assumed(score),
        _format_unmapped(score),
        product_line(score),
        overall_line(score),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _by_source(score: MemoryScore) -> str:
    lines = [
        "## By source and kind of memory",
        "",
        f"Predicted by: `{PRODUCT}` is `plan.memory()` alone; the other prediction adds the code that the "
        "publisher ran. `bias` is the median signed error; `inside` is the share of rows in the band.",
        "",
        "| source | kind | role | predicted by | rows | median | p90 | bias | under | over | inside |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (name, what), rows in score.groups.items():
        for role in ("calibration", "judge"):
            some = [row for row in rows if (row.mapped.row.get("role") or "judge") == role]
            lines += [f"| {name} | {what} | {role} | {figures}" for figures in _format_both_scores(some)]
    return "\n".join(lines)


def _format_both_scores(rows: list[Scored]) -> list[str]:
    """Format the cells of ``rows`` by the product and, where that differs, with the publisher's code."""
    if not rows:
        return []
    cells = [f"{PRODUCT} | {_format_figures([row.by_product for row in rows])} |"]
    if any(row.has_publisher_code for row in rows):
        cells.append(f"{WITH_CODE} | {_format_figures(rows)} |")
    return cells


def _format_figures(rows: list[Scored]) -> str:
    errors = sort_absolute_errors(rows)
    bias = median(row.error for row in rows)
    inside = sum(row.inside for row in rows) / len(rows)
    # A point without a band holds nothing.
    has_bands = any(row.predicted.low < row.predicted.high for row in rows)
    under, over = sum(row.error < 0 for row in rows), sum(row.error > 0 for row in rows)
    return (
        f"{len(rows)} | {100 * median(errors):.1f} % | {100 * compute_percentile(errors, 0.9):.1f} % | "
        f"{100 * bias:+.1f} % | {under} | {over} | " + (f"{100 * inside:.0f} %" if has_bands else "–")
    )


def _by_framework(score: MemoryScore) -> str:
    groups: dict[str, list[Scored]] = defaultdict(list)
    for row in score.scored:
        groups[f"{row.mapped.framework} | {row.mapped.plan.recipe.method}"].append(row)
    lines = [
        "## By framework",
        "",
        "| framework | method | predicted by | rows | median | p90 | bias | under | over | inside |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, rows in sorted(groups.items()):
        lines += [f"| {name} | {figures}" for figures in _format_both_scores(rows)]
    return "\n".join(lines)


def _by_component(score: MemoryScore) -> str:
    """Render the predicted components of each source's peaks; no source publishes measured ones."""
    names = [name for name in COMPONENTS if any(name in row.predicted.components for row in score.scored)]
    lines = [
        "## By component",
        "",
        "Published peaks are single numbers, so these are the median shares of the predicted peaks. In "
        "parentheses: the rank correlation of a component's share with the signed error. Beyond ±0.5 the "
        "component is a likely cause of the error.",
        "",
        "| source | kind | " + " | ".join(names) + " |",
        "|---|---" + "|---" * len(names) + "|",
    ]
    for (name, what), rows in score.groups.items():
        cells = []
        for component in names:
            shares = [row.predicted.components.get(component, 0) / row.predicted.point for row in rows]
            cells.append(
                f"{100 * median(shares):.0f} % ({_format_correlation(shares, [row.error for row in rows])})"
            )
        lines.append(f"| {name} | {what} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _format_correlation(first: list[float], second: list[float]) -> str:
    """Format Spearman's correlation, or a dash where either hardly varies."""
    if len(first) < 5 or len(set(first)) < 3 or len(set(second)) < 3:
        return "–"
    ranks = [[float(sorted(values).index(value)) for value in values] for values in (first, second)]
    return f"{correlation(ranks[0], ranks[1]):+.1f}"


def _format_worst(score: MemoryScore) -> str:
    lines = [
        "## Largest errors of each source",
        "",
        f"Sizes are in GiB. Predictions include the publisher's code; `{PRODUCT}` is the error of "
        "`plan.memory()` alone.",
        "",
        f"| row | plan | measured | predicted | band | error | {PRODUCT} | largest components | reason |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for rows in sorted(score.groups.values(), key=lambda rows: -sort_absolute_errors(rows)[-1]):
        for row in sorted(rows, key=lambda row: -abs(row.error))[:5]:
            band = f"{format_gib(row.predicted.low)} to {format_gib(row.predicted.high)}"
            lines.append(
                f"| {row.mapped.row.get('id')} | {_describe_plan(row)} | {format_gib(row.measured)} | "
                f"{format_gib(row.predicted.point)} | "
                f"{band if row.predicted.low < row.predicted.high else ''} | "
                f"{100 * row.error:+.1f} % | {100 * row.by_product.error:+.1f} % | {_format_largest(row)} | "
                f"{find_reason(row)} |"
            )
    return "\n".join(lines)


def _describe_plan(row: Scored) -> str:
    plan = row.mapped.plan
    recipe = plan.recipe
    return (
        f"{plan.architecture.name}, {plan.layout.description} on {plan.world_size}, {recipe.method}, "
        f"{recipe.micro_batch_size}×{recipe.seq_len}, recompute {recipe.recompute}"
    )


def _format_largest(row: Scored) -> str:
    largest = sorted(row.predicted.components.items(), key=lambda item: -item[1])[:4]
    return ", ".join(f"{name} {format_gib(value)}" for name, value in largest if value)


def _format_fits(score: MemoryScore) -> str:
    wrong = [fit for fit in score.fits if fit.ran != fit.predicted or fit.ran != fit.product]
    if not wrong:
        return ""
    lines = [
        "## Wrong predictions of fit",
        "",
        "| row | source | ran | predicted by | predicted peak, GiB | usable, GiB |",
        "|---|---|---|---|---|---|",
    ]
    for fit in wrong:
        predictions = {PRODUCT: (fit.mapped.plan.memory(), fit.product)}
        if has_publisher_code(fit.mapped):
            predictions[WITH_CODE] = (predict_row(fit.mapped)[0], fit.predicted)
        row, ran = fit.mapped.row, "yes" if fit.ran else "no"
        lines += [
            f"| {row.get('id')} | {read_source(row)} | {ran} | {by} | {format_gib(report.peak_bytes)} | "
            f"{format_gib(report.usable_bytes)} |"
            for by, (report, fits) in predictions.items()
            if fits != fit.ran
        ]
    return "\n".join(lines)


def _format_assumed(score: MemoryScore) -> str:
    pairs = ((read_source(one.mapped.row), text) for one in score.scored for text in one.mapped.assumed)
    return counted_table(ASSUMPTIONS, "assumption", pairs)


def _format_unmapped(score: MemoryScore) -> str:
    pairs = ((read_source(row), why) for row, why in score.unmapped)
    return counted_table("Rows without a plan", "reason", pairs)
