"""The section of docs/accuracy.md about our own runs: measured memory and errors of the prediction."""

from __future__ import annotations

from statistics import median

from tests.accuracy.scoring import MemoryScore, Scored

WORST = 10
MIB = 2**20


def own_report(score: MemoryScore) -> str:
    """Return errors by framework and method, the worst runs and those without a plan; empty without rows."""
    if not score.scored and not score.unmapped:
        return ""
    lines = [
        "## Against our own runs",
        "",
        "`python -m tests.accuracy.own_runs` samples plans by a seed, launches them as the Studio does, and",
        "appends the memory that the runs measured to `tests/measured/own.jsonl`. CPU ranks train tiny",
        "models of the catalogue's families with unchanged recipes and framework code: they show which",
        "tensors are alive at the peak, not the memory of a GPU's kernels. A run on a GPU has up to three",
        "rows: allocated, reserved and nvidia-smi's bytes.",
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
        "The largest errors:",
        "",
        "| run | plan | measured | predicted | error |",
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
