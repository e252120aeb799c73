"""The part of docs/accuracy.md about step times: errors by source, framework and GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median

from tests.accuracy.launch_bound import launch_bound_report
from tests.accuracy.row_counts import ASSUMPTIONS, counted_table
from tests.accuracy.rows import read_source
from tests.accuracy.scoring import compute_percentile
from tests.accuracy.time_scoring import (
    TimeScore,
    TimeScored,
    compute_spearman,
    overall_line,
    rank_correlation,
    rank_correlation_of_layouts,
    sort_absolute_errors,
    summarize_groups,
)
from tests.accuracy.uncalibrated_stacks import own_code_line, select_calibrated, uncalibrated_lines

from shardscope.timing.report import PARTS, format_part

HEADING = "# How accurate the predicted step times are"
_HOW = """\
Predictions of `plan.step()` are compared with published measurements of other projects (`tests/measured`,
rows of quality A with a speed). Each row is mapped to a plan by the options that it states; of nanotron's
rows a fixed sample of 150 is used. For a zero-bubble schedule, which no engine of Shardscope runs, the bubble
is the one of `plan.step().explain("bubble")`. Two pieces of publisher's code that no plan can express are
modelled from their source (`tests/accuracy/time_own_code.py`, nothing fitted): AutoGPTQ's dequantization in
Qwen's 4-bit rows, and the dispatch of Megatron-Bridge's recipes with DeepEP or HybridEP, which sends a token
to each node once. The tables by source and all tables below them include both; the last line is the product
without them, and the line above it has them. The step times are compared, computed from tokens/s per GPU
where a row has them, never MFU or TFLOP/s, which every source defines differently. An error is predicted /
measured - 1; medians and p90 are of absolute errors. NVIDIA's tables repeat configurations from release to
release, with figures that differ by up to two thirds: such a configuration counts once, with the median of
its figures.

Constants (`catalog/efficiency.toml`) were fitted with `python -m tests.accuracy.fitting` on rows of role
`calibration` only, by GPU generation, never by model or source; `judge` rows are held out. Published figures
of the same configuration differ from each other by a median of 6 % (p90 30 %): no model can do better. Two
software defaults changed after most rows were published, and the older ones are assumed: before torch 2.11,
`scaled_dot_product_attention` used FlashAttention's kernels on Hopper too, and before transformers 5
checkpoints of whole layers were reentrant. NeMo Automodel's rows are newer.

nanotron is not a framework of Shardscope. Its rows are planned as Megatron-core with nanotron's own stages;
nothing was fitted on them, and the goals and the last line leave them out, as they do GPU generations without
constants of their own. Its step times depend on effects that no plan expresses: Python between small kernels
(4.5 ms per layer and micro-batch at tp > 1, independent of its size), gradient reductions per parameter,
metadata messages before each transfer between stages, and a network on which rings across nodes reach a fifth
of the network cards' bandwidth. Some runs took ten times as long as similar ones."""
_SWEEP = 5
"""Number of layouts from which a source counts as a sweep of layouts."""
_GOALS = (0.08, 0.25, 0.9)
"""Median of source medians, p90, rank correlation in every source that sweeps layouts."""


def time_report(score: TimeScore) -> str:
    """Return the part as Markdown."""
    parts = [
        HEADING,
        "Written by `make accuracy`; do not edit.",
        _HOW,
        _format_goals(score),
        _by_source(score),
        _format_groups("## By framework", "framework", score, lambda one: one.mapped.framework),
        _format_groups("## By GPU", "GPU", score, lambda one: one.mapped.plan.cluster.gpu.name),
        _format_groups("## By training method and precision", "method, precision", score, _describe_method),
        _format_groups("## By parallel degrees", "degrees above one", score, _describe_degrees),
        _by_part(score),
        _format_worst(score),
        _format_assumed(score),
        _format_unmapped(score),
        launch_bound_report(),
        uncalibrated_lines(score),
        own_code_line(score),
        overall_line(select_calibrated(score).by_product),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _format_goals(score: TimeScore) -> str:
    lines = [
        "## Against the goals",
        "",
        "| rows | configurations | median of source medians (goal 8 %) | p90 (goal 25 %) |",
        "|---|---|---|---|",
    ]
    known = select_calibrated(score)
    for name, some in (
        ("judge", known.only("judge").by_product),
        ("calibration", known.only("calibration").by_product),
        ("both", known.by_product),
        ("judge, with publisher's code", known.only("judge")),
        ("both, with publisher's code", known),
    ):
        summaries = summarize_groups(some.by_source)
        if summaries is None:
            continue
        verdicts = [
            f"{100 * value:.1f} %: {'reached' if value <= goal else '**missed**'}"
            for value, goal in zip(summaries, _GOALS, strict=False)
        ]
        lines.append(f"| {name} | {len(some.scored)} | {' | '.join(verdicts)} |")
    lines += [
        "",
        "| source that sweeps layouts | configurations | layouts | rank correlation (goal 0.9) |",
        "|---|---|---|---|",
    ]
    for source_name, rows in known.by_source.items():
        layouts = {(row.mapped.plan.degrees, row.mapped.plan.layout.framework) for row in rows}
        summaries = rank_correlation(rows)
        if summaries is not None and len(layouts) >= _SWEEP:
            verdict = "reached" if summaries >= _GOALS[2] else "**missed**"
            lines.append(f"| {source_name} | {len(rows)} | {len(layouts)} | {summaries:.2f}: {verdict} |")
    return "\n".join(lines)


def _by_source(score: TimeScore) -> str:
    lines = [
        "## By source",
        "",
        "`bias` is the median signed error; `slower` and `faster` count predictions above and below the "
        "measured time. Rank correlations are Spearman's, of predicted and measured tokens/s per GPU: over "
        "all configurations of a source (goal 0.9 where it sweeps layouts), and within groups that differ in "
        "layout and batch only (one model, kind and number of GPUs, sequence length, precision and method; "
        "the mean over groups of five or more, weighted by size).",
        "",
        "| source | role | configurations | median | p90 | bias | slower | faster | rank correlation | "
        "within groups |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, rows in score.by_source.items():
        for role in ("calibration", "judge"):
            some = [row for row in rows if row.role == role]
            if some:
                over_all = _format_rank_correlation(rank_correlation(some))
                of_layouts = _format_rank_correlation(rank_correlation_of_layouts(some))
                lines.append(f"| {name} | {role} | {_format_figures(some)} | {over_all} | {of_layouts} |")
    return "\n".join(lines)


def _format_rank_correlation(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _format_figures(rows: Sequence[TimeScored]) -> str:
    errors = sort_absolute_errors(rows)
    slower, faster = sum(row.error > 0 for row in rows), sum(row.error < 0 for row in rows)
    return (
        f"{len(rows)} | {100 * median(errors):.1f} % | {100 * compute_percentile(errors, 0.9):.1f} % | "
        f"{100 * median(row.error for row in rows):+.1f} % | {slower} | {faster}"
    )


def _format_groups(heading: str, column: str, score: TimeScore, name: Callable[[TimeScored], str]) -> str:
    groups: dict[str, list[TimeScored]] = defaultdict(list)
    for one in score.scored:
        groups[name(one)].append(one)
    lines = [
        heading,
        "",
        f"| {column} | configurations | median | p90 | bias | slower | faster |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [f"| {key} | {_format_figures(rows)} |" for key, rows in sorted(groups.items())]
    return "\n".join(lines)


def _describe_method(one: TimeScored) -> str:
    recipe = one.mapped.plan.recipe
    return f"{recipe.method}, {recipe.precision}"


def _describe_degrees(one: TimeScored) -> str:
    degrees = one.mapped.plan.degrees
    named = [name for name in ("tp", "pp", "cp", "ep") if getattr(degrees, name) > 1]
    if one.mapped.plan.cluster.num_nodes > 1 and degrees.data_parallel > 1:
        named.insert(0, "dp across nodes")
    return ", ".join(named) or "none, or dp inside a node"


def _by_part(score: TimeScore) -> str:
    """Render the predicted parts of steps, and the correlation of each with the error."""
    names = [name for name in PARTS if any(one.report.parts[name] > 0 for one in score.scored)]
    lines = [
        "## By part of the step",
        "",
        "Median shares of the predicted steps. In parentheses: the rank correlation of a part's share with "
        "the signed error. Beyond ±0.5 the part is a likely cause of the error.",
        "",
        "| source | " + " | ".join(format_part(name) for name in names) + " |",
        "|---" + "|---" * len(names) + "|",
    ]
    for source_name, rows in score.by_source.items():
        cells = []
        for part in names:
            shares = [row.report.parts[part] / row.report.seconds for row in rows]
            grows = compute_spearman(shares, [row.error for row in rows]) if len(rows) >= 5 else None
            cells.append(f"{100 * median(shares):.0f} % ({'–' if grows is None else f'{grows:+.1f}'})")
        lines.append(f"| {source_name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _format_worst(score: TimeScore) -> str:
    lines = [
        "## Largest errors of each source",
        "",
        "| row | plan | measured | predicted | error | largest parts |",
        "|---|---|---|---|---|---|",
    ]
    for rows in sorted(score.by_source.values(), key=lambda rows: -sort_absolute_errors(rows)[-1]):
        for row in sorted(rows, key=lambda row: (-abs(row.error), str(row.mapped.row.get("id"))))[:5]:
            lines.append(
                f"| {row.mapped.row.get('id')} | {_describe_plan(row)} | {row.measured:.3g} s | "
                f"{row.seconds:.3g} s | {100 * row.error:+.1f} % | {_format_largest(row)} |"
            )
    return "\n".join(lines)


def _describe_plan(row: TimeScored) -> str:
    plan = row.mapped.plan
    recipe = plan.recipe
    return (
        f"{plan.architecture.name}, {plan.layout.description} on {plan.cluster}, {recipe.method}, "
        f"{recipe.precision}, {recipe.micro_batch_size}×{recipe.seq_len} of {recipe.global_batch_size}, "
        f"recompute {recipe.recompute}"
    )


def _format_largest(row: TimeScored) -> str:
    largest = sorted(row.report.parts.items(), key=lambda item: -item[1])[:4]
    return ", ".join(
        f"{format_part(name)} {100 * value / row.report.seconds:.0f} %" for name, value in largest if value
    )


def _format_assumed(score: TimeScore) -> str:
    pairs = ((one.source, text) for one in score.scored for text in one.mapped.assumed)
    return counted_table(ASSUMPTIONS, "assumption", pairs)


def _format_unmapped(score: TimeScore) -> str:
    pairs = ((read_source(row), why) for row, why in score.unmapped)
    return counted_table("Rows without a plan", "reason", pairs)
