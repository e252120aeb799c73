"""Checks of checkpoints: formats tied to the number of ranks, and resuming from a checkpoint of another
plan."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shardscope.core.finding import Finding
from shardscope.core.number_format import format_count
from shardscope.families.unknown import UnknownFamily, build_meta_model
from shardscope.frameworks.defaults import CheckpointFormat, CheckpointRequirement
from shardscope.frameworks.registry import frameworks
from shardscope.memory.state.lora import find_adapter_targets
from shardscope.planner.advice.descriptions import compare_seconds, name_plan
from shardscope.planner.checks.case import (
    NOTICEABLE,
    Case,
    evaluate_variants,
    predict_step,
    replace_plan_fields,
    replace_task_fields,
)
from shardscope.planner.checks.other_frameworks import (
    find_in_other_framework,
    replace_parts,
    search_other_frameworks,
)

if TYPE_CHECKING:
    from shardscope.core.architecture import Architecture
    from shardscope.core.finding import PlanChange
    from shardscope.core.plan import Plan

MOST_SLOWER = 1.1
"""Ratio of step times up to which a plan is offered for its checkpoints alone: the usual error of a
prediction."""


def check_checkpoint_format(case: Case) -> Iterator[Finding]:
    """Report a checkpoint format whose optimizer state loads only with the number of ranks that saved it."""
    plan = case.plan
    saved = _get_format(plan)
    # A requirement of one rank excludes nothing: a format that a single process wrote loads anywhere.
    tied = [requirement for requirement in saved.requirements.values() if requirement.num_ranks > 1]
    if not tied:
        return
    tie_text = " and ".join(requirement.text for requirement in tied)
    # Offer a framework whose format has no requirements. A full search for one takes seconds, so it waits
    # for a click.
    loose = _find_loose_plan(case)
    yield Finding(
        name="checkpoint-tied-to-ranks",
        severity="hint",
        why=f"{saved.name} loads with its optimizer over exactly {tie_text} ({saved.source}): on other "
        "numbers of GPUs a run cannot go on from it as it is.",
        number=float(tied[0].num_ranks),
        change=_describe_loose_plan(case, loose),
        plan=loose,
        search=None if loose else partial(_search_loose_plan, case),
    )


def _find_loose_plan(case: Case) -> Plan | None:
    """Return the plan with the same sharding in a framework whose checkpoints load over any number of ranks;
    None if there is none that is about as fast."""
    same = find_in_other_framework(case.plan, _is_loose)
    if same is None or _is_worth_it(case, same):
        return same
    if "reshard_after_forward" not in same.layout.choices:
        return None
    # FSDP2's default gathers weights in forward and backward as ZeRO-3 does, ZeRO-1 and 2 at most once.
    kept = evaluate_variants(same, [({}, {"reshard_after_forward": False})])
    return next((variant.plan for variant in kept if _is_worth_it(case, variant.plan)), None)


def _search_loose_plan(case: Case) -> PlanChange | None:
    """Return the best plan of another framework whose checkpoints load over any number of ranks; None if
    there is none that is about as fast."""
    change = search_other_frameworks(case.plan, lambda other: _is_loose(other) and _is_worth_it(case, other))
    if change is None:
        return None
    cost = _describe_cost(case, change.plan)
    return change._replace(changes=(*change.changes, cost)) if cost else change


def _describe_loose_plan(case: Case, loose: Plan | None) -> str:
    saved = _get_format(case.plan)
    if loose is None:
        searched = "another framework's plan that is about as fast"
        return f"{saved.remedy}; or {searched}" if saved.remedy else searched.capitalize()
    cost = _describe_cost(case, loose)
    gain = "which loads over any number of ranks" + (f" and is {cost}" if cost else "")
    return f"{_name_layout(loose, case.plan)}, {gain}{_format_alternative(saved)}"


def _is_worth_it(case: Case, other: Plan) -> bool:
    """Return whether the time that a plan loses is no more than :data:`MOST_SLOWER`, as far as known.

    Resuming over other ranks may never be needed, and a conversion costs minutes once: every step that takes
    longer for it costs more.
    """
    step = predict_step(other)
    return case.step is None or step is None or step.seconds <= MOST_SLOWER * case.step.seconds


def _describe_cost(case: Case, other: Plan) -> str:
    """Return the change of the step time: ``29 % slower``; empty if it is not known or not noticeable."""
    step = predict_step(other)
    if case.step is None or step is None or abs(step.seconds / case.step.seconds - 1) < NOTICEABLE:
        return ""
    return compare_seconds(step.seconds, case.step.seconds)


def _name_layout(other: Plan, plan: Plan) -> str:
    """Return the layout's name, and the precision if it differs from ``plan``'s."""
    precision = other.recipe.precision
    return name_plan(other, other.recipe) + (f" in {precision}" if precision != plan.recipe.precision else "")


def _is_loose(plan: Plan) -> bool:
    """Return whether the plan's checkpoints load with any number of ranks."""
    return all(requirement.num_ranks == 1 for requirement in _get_format(plan).requirements.values())


def check_kept_weights(case: Case) -> Iterator[Finding]:
    """Report a fine-tune that ends without a checkpoint and without exported weights."""
    # A model that is trained from random weights is seldom wanted for itself; a fine-tuned one always is.
    if getattr(case.task, "weights", None) is None or not getattr(case.task, "loses_weights", False):
        return
    yield Finding(
        name="trained-weights-not-kept",
        severity="warning",
        why="The run neither exports the trained weights nor saves a checkpoint: they are lost at its end.",
        number=None,
        change="export=True",
        task=replace_task_fields(case.task, export=True),
    )


def check_resumed_checkpoint(case: Case) -> Iterator[Finding]:
    """Report the differences between a task and the checkpoint of another plan that it resumes from."""
    path = getattr(case.task, "resume_from", None)
    if path is None:
        return
    from shardscope.records.json_files import read_json  # Imported here: planning does not need run records.

    # position.json is the task's own record, run.json the launcher's: a copied checkpoint may have only the
    # first.
    position = read_json(Path(path) / "position.json")
    if position is not None:
        yield from _check_base(case, position)
        yield from _check_seed(case, position)
    before = _read_plan(Path(path))
    if before is None:
        return
    now = case.plan
    yield from _check_format(before, now)
    yield from _check_model(before, now)
    yield from _check_weights(before, now)
    yield from _check_optimizer(before, now)
    yield from _check_batch(before, now, Path(path))


def _check_format(before: Plan, now: Plan) -> Iterator[Finding]:
    saved, read = _get_format(before), _get_format(now)
    # Another format cannot be read at all, so the comparison of its requirements would mean nothing.
    if saved.name != read.name:
        yield Finding(
            name="checkpoint-of-another-format",
            severity="danger",
            why=f"The checkpoint was saved by {before.layout.title} as {saved.name}; {now.layout.title} "
            f"reads {read.name}. Only weights can be moved: resume it with {before.layout.title} and "
            "export=True, and start ss.Finetune(run.model) from the result, with a new optimizer.",
            number=None,
            change=f"Go on with {before.layout.title}",
            plan=replace_parts(now, layout=before.layout),
        )
        return
    differing = _find_differing_requirements(saved, read)
    if not differing:
        return
    # The same format, but tied to something that differs, such as the number of data-parallel ranks of ZeRO's
    # optimizer state.
    was, wanted = (
        " and ".join(requirement.text for requirement in side) for side in zip(*differing, strict=True)
    )
    fixed, change = _restore_requirements(before, now, [requirement for requirement, _ in differing])
    yield Finding(
        name="checkpoint-of-other-ranks",
        severity="danger",
        why=f"The checkpoint was saved with {was}, and this plan has {wanted}: "
        f"{saved.name} does not load so ({saved.source}).",
        number=float(differing[0][0].num_ranks),
        change=f"{change}{_format_alternative(saved)}",
        plan=fixed,
    )


def _format_alternative(saved: CheckpointFormat) -> str:
    """Return the alternative fix as the end of a sentence; empty if there is none."""
    return f"; or {saved.remedy[:1].lower()}{saved.remedy[1:]}" if saved.remedy else ""


def _get_format(plan: Plan) -> CheckpointFormat:
    return frameworks[plan.layout.framework].defaults().get_checkpoint_format(plan)


def _find_differing_requirements(
    saved: CheckpointFormat, read: CheckpointFormat
) -> list[tuple[CheckpointRequirement, CheckpointRequirement]]:
    """Return the pairs of requirements (as saved, as loaded) that must be equal and differ."""
    return [
        (requirement, read.requirements[name])
        for name, requirement in saved.requirements.items()
        if read.requirements[name].value != requirement.value
    ]


def _restore_requirements(
    before: Plan, now: Plan, requirements: Sequence[CheckpointRequirement]
) -> tuple[Plan | None, str]:
    """Return ``now`` with ``requirements`` as they were, and the text of the fix.

    The plan is None if its fields cannot express that.
    """
    layout = {name: value for requirement in requirements for name, value in requirement.layout.items()}
    recipe = {name: value for requirement in requirements for name, value in requirement.recipe.items()}
    fields_text = ", ".join(f"{name}={value!r}" for name, value in {**layout, **recipe}.items())
    # Restore the fields that the format depends on, and accept the result only if the formats really agree
    # then: the number of ranks may differ too, which no field of the layout can change.
    has_them = bool(fields_text) and layout.keys() <= now.layout.__dataclass_fields__.keys()
    fixed = replace_plan_fields(now, layout=layout, recipe=recipe) if has_them else None
    if fixed is not None and not _find_differing_requirements(_get_format(before), _get_format(fixed)):
        return fixed, f"{fields_text}, as before"
    if type(before.layout) is not type(now.layout):
        return None, f"{before.layout.title} with {fields_text}, as before"
    # Fields alone are not sufficient: the number of ranks differs.
    ranks = format_count(before.world_size, "rank")
    return None, f"{', '.join(filter(None, (ranks, fields_text)))}, as before"


def _check_optimizer(before: Plan, now: Plan) -> Iterator[Finding]:
    was, wanted = before.recipe.optimizer, now.recipe.optimizer
    if _name_optimizer_state(was) == _name_optimizer_state(wanted):
        return
    yield Finding(
        name="checkpoint-of-another-optimizer",
        severity="danger",
        why=f"The checkpoint holds what optimizer={was!r} keeps, and this plan's is {wanted!r}, which keeps "
        "something else.",
        number=None,
        change=f"optimizer={was!r}, as before",
        plan=replace_plan_fields(now, recipe={"optimizer": was}),
    )


def _name_optimizer_state(optimizer: str) -> str:
    """Return the optimizer state's name: AdamW keeps the same state with and without ``foreach``."""
    return optimizer.removesuffix("_foreach")


def _check_model(before: Plan, now: Plan) -> Iterator[Finding]:
    # Names do not matter: a renamed model with the same parameters loads.
    if _count_parameters(before.architecture) == _count_parameters(now.architecture):
        return
    yield Finding(
        name="checkpoint-of-another-model",
        severity="danger",
        why=f"The checkpoint holds {before.architecture.name} ({before.architecture.num_parameters:,} "
        f"parameters), this plan trains {now.architecture.name} ({now.architecture.num_parameters:,}).",
        number=float(before.architecture.num_parameters),
        change=f"Train {before.architecture.name}, or start from the beginning",
        plan=replace_parts(now, architecture=before.architecture),
    )


def _count_parameters(architecture: Architecture) -> Mapping[str, int]:
    """Return the numbers of parameters by group, or by name in a family without formulas."""
    if not isinstance(architecture, UnknownFamily):
        return architecture.parameter_groups
    return {name: parameter.numel() for name, parameter in build_meta_model(architecture).named_parameters()}


def _check_weights(before: Plan, now: Plan) -> Iterator[Finding]:
    """Report adapters that would be loaded over another base: a checkpoint of adapters does not contain
    it."""
    was, wanted = _describe_trained(before), _describe_trained(now)
    # Another model is a finding of its own, and explains this one.
    if was == wanted or _count_parameters(before.architecture) != _count_parameters(now.architecture):
        return
    fields = ("method", "quantization", "lora_rank", "lora_targets", "lora_alpha", "use_rslora", "use_dora")
    yield Finding(
        name="checkpoint-of-other-weights",
        severity="danger",
        why=f"The checkpoint holds {was}, and this plan trains {wanted}.",
        number=None,
        change=f"Train {was}, or start from the beginning",
        plan=replace_plan_fields(now, recipe={name: getattr(before.recipe, name) for name in fields}),
    )


def _describe_trained(plan: Plan) -> str:
    recipe = plan.recipe
    if not recipe.has_adapters:
        return "all weights"
    kind = {"nf4": "in NF4", "int8": "in int8", None: "that is not quantized"}[recipe.base_quantization]
    double = " with double quantization" if recipe.method == "qlora" else ""
    targets = ", ".join(sorted(find_adapter_targets(plan.architecture, recipe)))
    is_usual = recipe.adapter_alpha == 2 * recipe.adapter_rank and not recipe.use_rslora
    scaled = "" if is_usual else f" and alpha {recipe.adapter_alpha:g}"
    scaled += " (rsLoRA)" if recipe.use_rslora else ""
    scaled += " with magnitudes (DoRA)" if recipe.use_dora else ""
    return f"adapters of rank {recipe.adapter_rank}{scaled} on {targets}, over a base {kind}{double}"


def _check_base(case: Case, position: Mapping[str, object]) -> Iterator[Finding]:
    """Report a frozen base of the same shape with other weights: another seed, or another folder."""
    # Adapters are differences to their base's weights. Over another base of the same shape they load without
    # an error and compute nonsense, so the run that saved them recorded a sample of the base.
    was = position.get("frozen_base")
    if not case.plan.recipe.has_adapters or not isinstance(was, Mapping):
        return
    now = _get_frozen_base(case.task)
    if now is None or (was.get("seed"), was.get("sample")) == (now.get("seed"), now.get("sample")):
        return
    yield Finding(
        name="checkpoint-over-another-base",
        severity="danger",
        why=f"The checkpoint holds adapters over a base {_describe_base(was)}, and this task's is "
        f"{_describe_base(now)}: trained adapters are meaningless over another base.",
        number=None,
        change=_suggest_base(was, now),
        task=replace_task_fields(case.task, seed=was["seed"]) if "seed" in was and "seed" in now else None,
    )


def _get_frozen_base(task: object) -> Mapping[str, object] | None:
    """Return the frozen base of ``task``; None if it is not known, or its files cannot be read."""
    base = getattr(task, "frozen_base", None)
    try:
        base = base() if callable(base) else base
    except (ValueError, OSError):
        return None
    return base if isinstance(base, Mapping) else None


def _describe_base(base: Mapping[str, object]) -> str:
    return (
        f"initialized from seed {base['seed']}"
        if "seed" in base
        else f"of the weights in {base.get('weights')}"
    )


def _suggest_base(was: Mapping[str, object], now: Mapping[str, object]) -> str:
    """Return the suggested fix: the task that resumes from a checkpoint over ``was``."""
    if "seed" in was:
        return f"{'' if 'seed' in now else 'Pretrain with '}seed={was['seed']}, as before"
    # The same folder with other contents: no field of the task can restore them.
    folder = was.get("weights")
    if folder == now.get("weights"):
        return "Put back the weights that were there before, or start from the beginning"
    return f"{'Finetune with ' if 'seed' in now else ''}weights={folder!r}, as before"


def _check_seed(case: Case, position: Mapping[str, object]) -> Iterator[Finding]:
    """Report another seed: the task's seed determines the order of the text."""
    was, now = position.get("seed"), getattr(case.task, "seed", None)
    if not isinstance(was, int) or not isinstance(now, int) or was == now:
        return
    yield Finding(
        name="checkpoint-of-another-seed",
        severity="warning",
        why=f"The checkpoint's run read its text in the order of seed {was}, and this task goes on in that "
        f"of seed {now}: some of it is read again, and some never.",
        number=float(was),
        change=f"seed={was}, as before",
        task=replace_task_fields(case.task, seed=was),
    )


def _check_batch(before: Plan, now: Plan, path: Path) -> Iterator[Finding]:
    """Report another global batch size: the position in the text follows from the step number alone."""
    steps = _read_num_steps(path)
    # With another sequence length the windows of the text are different ones, and sequences cannot be
    # compared.
    if steps is None or before.recipe.seq_len != now.recipe.seq_len:
        return
    was, wanted = before.recipe.global_batch_size, now.recipe.global_batch_size
    if was == wanted:
        return
    # A step reads the sequences step * batch to (step + 1) * batch: a larger batch skips some, a smaller one
    # repeats some.
    moved = steps * (wanted - was)
    what = "are never read" if moved > 0 else "are read again"
    yield Finding(
        name="checkpoint-of-another-batch",
        severity="warning",
        why=f"The checkpoint has {steps:,} steps of {was:,} sequences, and this plan takes {wanted:,}: text "
        f"is dealt by the step's number, so that {abs(moved):,} sequences {what}.",
        number=float(abs(moved)),
        change=f"global_batch_size={was}, as before",
        plan=replace_plan_fields(now, recipe={"global_batch_size": was}),
    )


def _read_plan(path: Path) -> Plan | None:
    """Return the plan of the run that saved checkpoint ``path``; None if it is not known."""
    from shardscope.core.plan import Plan
    from shardscope.records.json_files import read_json  # Imported here: planning does not need run records.

    # A checkpoint is runs/NAME/checkpoints/step-N: two folders below the run's description.
    record = read_json(path.parent.parent / "run.json")
    if record is None or not isinstance(record.get("plan"), dict):
        return None
    try:
        return Plan.from_json(json.dumps(record["plan"]))
    except ValueError:
        return None


def _read_num_steps(path: Path) -> int | None:
    from shardscope.records.json_files import read_json

    num_steps = (read_json(path / "position.json") or {}).get("num_steps_done")
    return num_steps if isinstance(num_steps, int) else None
