"""The part of docs/accuracy.md about step times: what was scored, how well, the worst first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median

from tests.accuracy.launch_bound import launch_bound_report
from tests.accuracy.row_counts import counted_table
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
from tests.accuracy.uncalibrated_stacks import apart_lines, described_line, select_calibrated

from shardscope.timing.report import PARTS

HEADING = "# How accurate the predicted step times are"
_HOW = """\
Grade A rows of others' published runs that say how fast they were, mapped to plans by what they say, each
predicted by `plan.step()`; of nanotron's rows a fixed sample of 150. A zero-bubble schedule, which no engine
of ours runs, counts by the bubble that `plan.step().explain("bubble")` tells of it. What ran beside and no
plan of ours says is added from its published code (`tests/accuracy/time_own_code.py`, nothing fitted):
AutoGPTQ's unpacking in Qwen's 4-bit rows, and in Megatron-Bridge's recipes that take DeepEP or HybridEP
tokens that cross to a node once. The tables by source and below have both; the last line has neither, for it
is the product's, and the line above it says what both change. What is compared is the time of one step, from
tokens a second of one GPU where a row has them, never MFU or TFLOP/s, which every source counts in its own
way. Errors are predicted over measured seconds, less one; medians and p90 are of absolute errors. NVIDIA's
tables repeat configurations from release to release, whose figures differ by up to two thirds: such a
configuration counts once, by the median of its figures.

Constants (`catalog/efficiency.toml`) were fitted by `python -m tests.accuracy.fitting` on rows of role
`calibration` alone, by GPU generation and never by model or source; `judge` rows are apart. Published figures
of the same configuration differ among themselves by a median of 6 % (p90 30 %): no model can do better.
Two facts of a stack changed after most rows were published, and are taken as they were: before torch 2.11,
`scaled_dot_product_attention` ran FlashAttention's kernels on Hopper too, and before transformers 5
checkpoints of whole layers were reentrant. NeMo Automodel's rows are newer.

nanotron is none of our frameworks: its rows are planned as Megatron-core's with nanotron's own stages,
nothing was fitted on them, and they are apart from goals and last line, as are GPUs of generations without
constants of their own. Its runs hang on what no plan says: Python between small kernels (4.5 ms a layer and
micro-batch at tp > 1, whatever its size), reductions parameter by parameter, messages about messages between
stages, and a network that gives rings over nodes a fifth of its cards; some took ten times as long as their
like."""
_SWEEP = 5
"""Layouts from which on a source sweeps them."""
_GOALS = (0.08, 0.25, 0.9)
"""Median of source medians, p90, rank correlation in every source that sweeps layouts."""


def time_report(score: TimeScore) -> str:
    """The whole part as Markdown."""
    parts = [
        HEADING,
        "Written by `make accuracy`; do not edit.",
        _HOW,
        _format_goals(score),
        _by_source(score),
        _format_groups("## By framework", "framework", score, lambda one: one.mapped.framework),
        _format_groups("## By GPU", "GPU", score, lambda one: one.mapped.plan.cluster.gpu.name),
        _format_groups(
            "## By what is trained, and in which precision", "method, precision", score, _describe_method
        ),
        _format_groups("## By degrees above one", "degrees", score, _describe_degrees),
        _by_part(score),
        _format_worst(score),
        _format_assumed(score),
        _format_unmapped(score),
        launch_bound_report(),
        apart_lines(score),
        described_line(score),
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
        ("judge, with what ran beside it described", known.only("judge")),
        ("both, with what ran beside it described", known),
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
        "Ranks are Spearman's correlation of predicted with measured tokens a second of one GPU: over all of "
        "a source's configurations (goal 0.9 where it sweeps layouts), and within those of one model on one "
        "kind and number of GPUs with one sequence length, which differ in layout and batch alone (mean over "
        "such groups of five or more, weighted by size).",
        "",
        "| source | role | configurations | median | p90 | bias | slower | faster | ranks | of layouts |",
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


def _format_groups(heading: str, what: str, score: TimeScore, name: Callable[[TimeScored], str]) -> str:
    groups: dict[str, list[TimeScored]] = defaultdict(list)
    for one in score.scored:
        groups[name(one)].append(one)
    lines = [
        heading,
        "",
        f"| {what} | configurations | median | p90 | bias | slower | faster |",
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
        named.insert(0, "data over nodes")
    return ", ".join(named) or "none, or data in a node"


def _by_part(score: TimeScore) -> str:
    """Render the predicted parts of steps, and whether the error grows with each."""
    names = [name for name in PARTS if any(one.report.parts[name] > 0 for one in score.scored)]
    lines = [
        "## By part",
        "",
        "Median shares of the predicted steps, and how the error grows with each (rank correlation of its "
        "share with the signed error; beyond ±0.5 it points at it).",
        "",
        "| source | " + " | ".join(name.replace("_", " ") for name in names) + " |",
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
        "## The worst configurations of each source",
        "",
        "| row | what | measured | predicted | error | largest parts |",
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
    found = sorted(row.report.parts.items(), key=lambda item: -item[1])[:4]
    return ", ".join(
        f"{name.replace('_', ' ')} {100 * value / row.report.seconds:.0f} %" for name, value in found if value
    )


def _format_assumed(score: TimeScore) -> str:
    pairs = ((one.source, words) for one in score.scored for words in one.mapped.assumed)
    return counted_table("What rows leave open, and was assumed", "assumed", pairs)


def _format_unmapped(score: TimeScore) -> str:
    pairs = ((read_source(row), why) for row, why in score.unmapped)
    return counted_table("Rows without a plan", "reason", pairs)
