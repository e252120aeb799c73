"""docs/accuracy.md: what was scored, how well, the worst first, and why."""

from __future__ import annotations

from collections import defaultdict
from statistics import correlation, median

from tests.accuracy.ablation import ablation_report
from tests.accuracy.error_reasons import find_reason
from tests.accuracy.goals import alone_line, goals_report
from tests.accuracy.nvidia_smi_pairs import pairs_report
from tests.accuracy.row_counts import counted_table
from tests.accuracy.rows import read_source
from tests.accuracy.scoring import (
    MemoryScore,
    Scored,
    compute_percentile,
    format_gib,
    is_described,
    overall_line,
    predict_row,
    sort_absolute_errors,
)

from shardscope.memory.report import COMPONENTS

_HOW = """Grade A rows of others' published runs, mapped to plans by what they say, and scored source by
source and by what each figure counts; of nanotron's rows a fixed sample of 150. `allocated` and `active`
figures are held against tensors alone, `reserved` ones against tensors and what the allocator loses,
`nvidia-smi` ones against everything; `unknown` ones against tensors, with a band up to everything. Errors
are predicted over measured less one; medians and p90 are of absolute errors, of the point also where there
is a band. Megatron-Bridge's figures are taken as the decimal GB that its log prints, whatever its pages
call them (`tests/accuracy/measurement_kinds.py`). FMS-acceleration's runs are there twice: what torch had
allocated, and what nvidia-smi saw.

Constants may be fitted on rows of role `calibration`; `judge` rows are apart, and what was ever checked on
some of them is said below ("What ran beside the plans"). nanotron is no framework of ours:
`tests/accuracy/nanotron.py` has its first stage from its source, to which `calibration` rows added two
choices (which stage takes a block at a tie, and how much a band allows to stay reserved). They made one
more: which way Moonlight's optimizer goes."""


def memory_report(score: MemoryScore, *sections: str) -> str:
    """The whole report as Markdown; ``sections`` are those about rehearsals and our own runs."""
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
        alone_line(score),
        overall_line(score),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _by_source(score: MemoryScore) -> str:
    lines = [
        "## By source and kind of memory",
        "",
        "`by` says whose word it is: the product's alone, or with what ran beside it described.",
        "",
        "| source | kind | role | by | rows | median | p90 | bias | under | over | inside |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (name, what), rows in score.groups.items():
        for role in ("calibration", "judge"):
            some = [row for row in rows if (row.mapped.row.get("role") or "judge") == role]
            lines += [f"| {name} | {what} | {role} | {figures}" for figures in _format_both_scores(some)]
    return "\n".join(lines)


def _format_both_scores(rows: list[Scored]) -> list[str]:
    """Format the cells of ``rows`` by the product alone and, where that differs, as described."""
    if not rows:
        return []
    found = [f"alone | {_format_figures([row.by_product for row in rows])} |"]
    if any(row.is_described for row in rows):
        found.append(f"described | {_format_figures(rows)} |")
    return found


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
        "| framework | method | by | rows | median | p90 | bias | under | over | inside |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, rows in sorted(groups.items()):
        lines += [f"| {name} | {figures}" for figures in _format_both_scores(rows)]
    return "\n".join(lines)


def _by_component(score: MemoryScore) -> str:
    """Nobody publishes components, so this says what each source's peaks are made of by our count."""
    names = [name for name in COMPONENTS if any(name in row.predicted.components for row in score.scored)]
    lines = [
        "## By component",
        "",
        "Published peaks are single numbers: these are the shares of the predicted ones, and how the error "
        "grows with each (rank correlation of its share with the signed error; beyond ±0.5 it points at it).",
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
        "## The worst rows of each source",
        "",
        "As described; `alone` is the error of `plan.memory()` and nothing else.",
        "",
        "| row | what | measured | predicted | band | error | alone | largest components | why |",
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
    found = sorted(row.predicted.components.items(), key=lambda item: -item[1])[:4]
    return ", ".join(f"{name} {format_gib(value)}" for name, value in found if value)


def _format_fits(score: MemoryScore) -> str:
    wrong = [fit for fit in score.fits if fit.ran != fit.predicted or fit.ran != fit.alone]
    if not wrong:
        return ""
    lines = [
        "## Fits or not, wrong",
        "",
        "| row | source | ran | by | predicted peak | usable |",
        "|---|---|---|---|---|---|",
    ]
    for fit in wrong:
        reports = {"alone": (fit.mapped.plan.memory(), fit.alone)}
        if is_described(fit.mapped):
            reports["described"] = (predict_row(fit.mapped)[0], fit.predicted)
        row, ran = fit.mapped.row, "yes" if fit.ran else "no"
        lines += [
            f"| {row.get('id')} | {read_source(row)} | {ran} | {by} | {format_gib(report.peak_bytes)} | "
            f"{format_gib(report.usable_bytes)} |"
            for by, (report, said) in reports.items()
            if said != fit.ran
        ]
    return "\n".join(lines)


def _format_assumed(score: MemoryScore) -> str:
    pairs = ((read_source(one.mapped.row), words) for one in score.scored for words in one.mapped.assumed)
    return counted_table("What rows leave open, and was assumed", "assumed", pairs)


def _format_unmapped(score: MemoryScore) -> str:
    pairs = ((read_source(row), why) for row, why in score.unmapped)
    return counted_table("Rows without a plan", "reason", pairs)
