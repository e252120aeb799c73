"""Checkpoints: what ties them to their ranks, and what a run that goes on from one would read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardscope.frameworks.registry import frameworks
from shardscope.memory.lora import adapter_targets
from shardscope.planner.preflight.case import Case, changed_plan
from shardscope.planner.preflight.finding import Finding

if TYPE_CHECKING:
    from shardscope.plan import Plan

DEGREE_WORDS = {
    "data_parallel": "data-parallel ranks",
    "tp": "tensor-parallel ranks",
    "pp": "pipeline stages",
    "ep": "expert-parallel ranks",
}


def tied_checkpoints(case: Case) -> Iterator[Finding]:
    """A format whose optimizer loads over as many ranks only as saved it."""
    plan = case.plan
    saved = frameworks[plan.layout.framework].habits().checkpoint(plan)
    if not saved.tied_to:
        return
    ranks = [(getattr(plan.degrees, name), DEGREE_WORDS[name]) for name in saved.tied_to]
    told = " and ".join(f"{number} {words}" for number, words in ranks)
    yield Finding(
        name="checkpoint-tied-to-ranks",
        severity="hint",
        why=f"{saved.name} loads with its optimizer over exactly {told} ({saved.source}): on other numbers "
        "of GPUs a run cannot go on from it as it is.",
        number=float(ranks[0][0]),
        change=saved.remedy,
    )


def resumed(case: Case) -> Iterator[Finding]:
    """A task that goes on from a checkpoint of another plan."""
    path = getattr(case.task, "resume_from", None)
    if path is None:
        return
    before = _plan_of(Path(path))
    if before is None:
        return
    now = case.plan
    yield from _other_format(before, now)
    yield from _other_model(before, now)
    yield from _other_weights(before, now)
    yield from _other_batch(before, now, Path(path))


def _other_format(before: Plan, now: Plan) -> Iterator[Finding]:
    saved = frameworks[before.layout.framework].habits().checkpoint(before)
    read = frameworks[now.layout.framework].habits().checkpoint(now)
    if saved.name != read.name:
        yield Finding(
            name="checkpoint-of-another-format",
            severity="danger",
            why=f"The checkpoint was saved by {before.layout.title} as {saved.name}; {now.layout.title} "
            f"reads {read.name}.",
            number=None,
            change=f"Go on with {before.layout.title}, or convert it",
        )
        return
    for name in saved.tied_to:
        was, wanted = getattr(before.degrees, name), getattr(now.degrees, name)
        if was != wanted:
            yield Finding(
                name="checkpoint-of-other-ranks",
                severity="danger",
                why=f"The checkpoint was saved over {was} {DEGREE_WORDS[name]}, and this plan has {wanted}: "
                f"{saved.name} does not load so ({saved.source}).",
                number=float(was),
                change=saved.remedy,
            )


def _other_model(before: Plan, now: Plan) -> Iterator[Finding]:
    if before.architecture.parameter_groups == now.architecture.parameter_groups:
        return
    yield Finding(
        name="checkpoint-of-another-model",
        severity="danger",
        why=f"The checkpoint holds {before.architecture.name} ({before.architecture.num_parameters:,} "
        f"parameters), this plan trains {now.architecture.name} ({now.architecture.num_parameters:,}).",
        number=float(before.architecture.num_parameters),
        change=f"Train {before.architecture.name}, or start anew",
    )


def _other_weights(before: Plan, now: Plan) -> Iterator[Finding]:
    """Of adapters a checkpoint has no base: over another one they would go on without a word."""
    was, wanted = _trained(before), _trained(now)
    if was == wanted or before.architecture.parameter_groups != now.architecture.parameter_groups:
        return
    fields = ("method", "quantization", "lora_rank", "lora_targets")
    yield Finding(
        name="checkpoint-of-other-weights",
        severity="danger",
        why=f"The checkpoint holds {was}, and this plan trains {wanted}.",
        number=None,
        change=f"Train {was}, or start anew",
        plan=changed_plan(now, recipe={name: getattr(before.recipe, name) for name in fields}),
    )


def _trained(plan: Plan) -> str:
    recipe = plan.recipe
    if not recipe.has_adapters:
        return "all weights"
    kind = {"nf4": "in NF4", "int8": "in int8", None: "that is not quantised"}[recipe.base_quantization]
    double = " with double quantisation" if recipe.method == "qlora" else ""
    targets = ", ".join(sorted(adapter_targets(plan.architecture, recipe)))
    return f"adapters of rank {recipe.adapter_rank} on {targets}, over a base {kind}{double}"


def _other_batch(before: Plan, now: Plan, path: Path) -> Iterator[Finding]:
    """Text is dealt by the step alone: another batch begins elsewhere in it."""
    steps = _steps_done(path)
    if steps is None or before.recipe.seq_len != now.recipe.seq_len:
        return
    was, wanted = before.recipe.global_batch_size, now.recipe.global_batch_size
    if was == wanted:
        return
    moved = steps * (wanted - was)
    what = "are never read" if moved > 0 else "are read again"
    yield Finding(
        name="checkpoint-of-another-batch",
        severity="warning",
        why=f"The checkpoint has {steps:,} steps of {was:,} sequences, and this plan takes {wanted:,}: text "
        f"is dealt by the step's number, so that {abs(moved):,} sequences {what}.",
        number=float(abs(moved)),
        change=f"global_batch_size={was}, as before",
        plan=changed_plan(now, recipe={"global_batch_size": was}),
    )


def _plan_of(path: Path) -> Plan | None:
    """The plan of the run whose checkpoint ``path`` is; None where that is not known."""
    from shardscope.plan import Plan

    record = _read(path.parent.parent / "run.json")
    if not isinstance(record, dict) or not isinstance(record.get("plan"), dict):
        return None
    try:
        return Plan.from_json(json.dumps(record["plan"]))
    except ValueError:
        return None


def _steps_done(path: Path) -> int | None:
    record = _read(path / "position.json")
    found = record.get("num_steps_done") if isinstance(record, dict) else None
    return found if isinstance(found, int) else None


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
