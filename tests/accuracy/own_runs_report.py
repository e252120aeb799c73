"""The section of the report about our own runs: what ranks held, and how far the prediction was off."""

from __future__ import annotations

from statistics import median

from tests.accuracy.scoring import MemoryScore, Scored

WORST = 10
MIB = 2**20


def own_report(score: MemoryScore) -> str:
    """Errors by framework and method, the worst runs, and what had no plan; empty where nothing was run."""
    if not score.scored and not score.unmapped:
        return ""
    lines = [
        "## Against our own runs",
        "",
        "Real ranks, real steps: `python -m tests.accuracy.own_runs` draws plans by a seed, launches them as",
        "the Studio's button does, and writes what the runs counted into `tests/measured/own.jsonl`. On CPU",
        "ranks models are tiny twins of the catalogue's: families, recipes and framework code as they are,",
        "and sizes not. They prove which tensors are alive at the peak, not what a GPU's kernels take.",
        "",
        "| framework | method | runs | median | within 0.3 % | within 1 % | worst |",
        "|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str], list[Scored]] = {}
    for row in score.scored:
        plan = row.mapped.plan
        groups.setdefault((plan.layout.title, plan.recipe.method), []).append(row)
    lines += [
        f"| {title} | {method} | {_format_figures(rows)} |"
        for (title, method), rows in sorted(groups.items())
    ]
    lines += [
        "",
        "The worst of them:",
        "",
        "| run | what | measured | predicted | error |",
        "|---|---|---|---|---|",
    ]
    for row in sorted(score.scored, key=lambda row: -abs(row.error))[:WORST]:
        lines.append(
            f"| {row.mapped.row.get('id')} | {_describe_plan(row)} | {row.measured / MIB:.2f} MiB | "
            f"{row.predicted.point / MIB:.2f} MiB | {100 * row.error:+.2f} % |"
        )
    lines += [f"- without a plan: {row.get('id')}: {why}" for row, why in score.unmapped]
    return "\n".join(lines)


def _format_figures(rows: list[Scored]) -> str:
    errors = [abs(row.error) for row in rows]
    within = [sum(error <= limit for error in errors) for limit in (0.003, 0.01)]
    worst = max(rows, key=lambda row: abs(row.error)).error
    return f"{len(rows)} | {100 * median(errors):.2f} % | {within[0]} | {within[1]} | {100 * worst:+.2f} %"


def _describe_plan(row: Scored) -> str:
    plan = row.mapped.plan
    recipe, layout = plan.recipe, plan.layout
    parts = [
        f"{plan.architecture.name}, {layout.description} on {plan.world_size}",
        f"{recipe.method}, {recipe.precision}, {recipe.optimizer}",
        f"{recipe.micro_batch_size}×{recipe.seq_len}",
    ]
    if recipe.recompute != "none":
        parts.append(
            f"recompute {recipe.recompute}"
            + f" every {recipe.recompute_interval}" * (recipe.recompute_interval > 1)
        )
    if recipe.loss == "chunked":
        parts.append("loss in chunks")
    return ", ".join(parts)
