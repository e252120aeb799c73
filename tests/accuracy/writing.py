"""docs/accuracy.md: what was scored, how well, the worst first, and why."""

from __future__ import annotations

from collections import defaultdict
from statistics import median

from tests.accuracy.kinds import kind
from tests.accuracy.rows import source
from tests.accuracy.scoring import MemoryScore, Scored, absolute, gib, percentile, summary

GOALS = {"allocated": "median of source medians 3 %, p90 8 %", "reserved": "80 % inside the band"}


def memory_report(score: MemoryScore) -> str:
    """The whole report as Markdown."""
    parts = [
        "# How accurate the predictions are",
        "Written by `make accuracy`; do not edit.",
        _goals(score),
        _by_source(score),
        _by_framework(score),
        _worst(score),
        _fits(score),
        _unmapped(score),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _goals(score: MemoryScore) -> str:
    lines = ["## Against the goals", "", "| what | reached | goal |", "|---|---|---|"]
    exact = {group: rows for group, rows in score.groups.items() if group[1] == "allocated"}
    found = summary(exact)
    if found:
        rows = sum(map(len, exact.values()))
        lines.append(
            f"| allocated and active, {rows} rows of {len(exact)} sources | median of source medians "
            f"{100 * found[0]:.1f} %, p90 {100 * found[1]:.1f} % | 3 %, 8 % |"
        )
    for name in ("reserved", "nvidia-smi", "unknown"):
        rows_of = [row for row in score.scored if kind(row.mapped.row) == name]
        if rows_of:
            share = sum(row.inside for row in rows_of) / len(rows_of)
            goal = "80 %" if name != "unknown" else "none"
            lines.append(f"| {name}, {len(rows_of)} rows: inside the band | {100 * share:.0f} % | {goal} |")
    if score.fits:
        right = sum(fit.ran == fit.predicted for fit in score.fits) / len(score.fits)
        lines.append(f"| fits or not, {len(score.fits)} rows | {100 * right:.1f} % | 98 % |")
    return "\n".join(lines)


def _by_source(score: MemoryScore) -> str:
    lines = [
        "## By source and kind of memory",
        "",
        "| source | kind | role | rows | median | p90 | bias | inside |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (name, what), rows in score.groups.items():
        for role in ("calibration", "judge"):
            some = [row for row in rows if (row.mapped.row.get("role") or "judge") == role]
            if some:
                lines.append(f"| {name} | {what} | {role} | {_figures(some)} |")
    return "\n".join(lines)


def _figures(rows: list[Scored]) -> str:
    errors = absolute(rows)
    bias = median(row.error for row in rows)
    inside = sum(row.inside for row in rows) / len(rows)
    return (
        f"{len(rows)} | {100 * median(errors):.1f} % | {100 * percentile(errors, 0.9):.1f} % | "
        f"{100 * bias:+.1f} % | {100 * inside:.0f} %"
    )


def _by_framework(score: MemoryScore) -> str:
    groups: dict[str, list[Scored]] = defaultdict(list)
    for row in score.scored:
        groups[f"{row.mapped.framework} | {row.mapped.plan.recipe.method}"].append(row)
    lines = [
        "## By framework",
        "",
        "| framework | method | rows | median | p90 | bias | inside |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [f"| {name} | {_figures(rows)} |" for name, rows in sorted(groups.items())]
    return "\n".join(lines)


def _worst(score: MemoryScore) -> str:
    lines = [
        "## The worst rows of each source",
        "",
        "| row | what | measured | predicted | error | largest components |",
        "|---|---|---|---|---|---|",
    ]
    for rows in score.groups.values():
        for row in sorted(rows, key=lambda row: -abs(row.error))[:5]:
            lines.append(
                f"| {row.mapped.row.get('id')} | {_what(row)} | {gib(row.measured)} | {gib(row.predicted.point)} | {100 * row.error:+.1f} % | {_largest(row)} |"
            )
    return "\n".join(lines)


def _what(row: Scored) -> str:
    plan = row.mapped.plan
    recipe = plan.recipe
    return (
        f"{plan.architecture.name}, {plan.layout.description} on {plan.world_size}, {recipe.method}, "
        f"{recipe.micro_batch_size}×{recipe.seq_len}, recompute {recipe.recompute}"
    )


def _largest(row: Scored) -> str:
    found = sorted(row.predicted.components.items(), key=lambda item: -item[1])[:4]
    return ", ".join(f"{name} {gib(value)}" for name, value in found if value)


def _fits(score: MemoryScore) -> str:
    wrong = [fit for fit in score.fits if fit.ran != fit.predicted]
    if not wrong:
        return ""
    lines = [
        "## Fits or not, wrong",
        "",
        "| row | source | ran | predicted peak | usable |",
        "|---|---|---|---|---|",
    ]
    for fit in wrong:
        report = fit.mapped.plan.memory()
        lines.append(
            f"| {fit.mapped.row.get('id')} | {source(fit.mapped.row)} | {'yes' if fit.ran else 'no'} | {gib(report.peak_bytes)} | {gib(report.usable_bytes)} |"
        )
    return "\n".join(lines)


def _unmapped(score: MemoryScore) -> str:
    if not score.unmapped:
        return ""
    lines = ["## Rows without a plan", "", "| rows | source | reason |", "|---|---|---|"]
    counted: dict[tuple[str, str], int] = defaultdict(int)
    for row, reason in score.unmapped:
        counted[source(row), reason] += 1
    for (name, reason), count in sorted(counted.items(), key=lambda item: (-item[1], item[0])):
        lines.append(f"| {count} | {name} | {reason} |")
    return "\n".join(lines)
