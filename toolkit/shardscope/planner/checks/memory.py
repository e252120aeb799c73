"""Checks of memory that is too small or of unknown size: GPU memory, host memory and NVMe of a node."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from shardscope.core.cluster import name_device
from shardscope.core.finding import Finding, PlanChange, Question
from shardscope.core.layout import list_divisors
from shardscope.core.number_format import format_gib
from shardscope.memory.activations.forward import check_known
from shardscope.memory.overheads.libraries import TIGHT_PERCENT
from shardscope.planner.advice.plan_evaluator import PAYS, SAFE, has_offload
from shardscope.planner.checks.case import Case, Variant, evaluate_variants, find_fastest
from shardscope.planner.checks.number_format import format_percent
from shardscope.planner.checks.recomputation import find_recomputation
from shardscope.planner.memory_needs import (
    WHILE_BUILT,
    MemoryNeed,
    compute_loose_headroom,
    fits,
    list_memory_needs,
)
from shardscope.planner.repairs.combined_changes import (
    describe_change,
    find_on_more_nodes,
    find_smaller_model,
    list_other_frameworks,
    search_change,
)
from shardscope.planner.repairs.make_it_fit import make_it_fit
from shardscope.planner.repairs.repairs import COMBINE, MAX_TIMES_SLOWER, predict_seconds
from shardscope.planner.repairs.single_changes import RECIPE_TEXTS
from shardscope.prediction.support import list_supported

if TYPE_CHECKING:
    from shardscope.core.plan import Plan
    from shardscope.planner.repairs.repairs import Repair

RECOMPUTED = ("none", "selective", "full")

NAMES = {
    "GPU memory": "gpu-memory",
    "host memory": "host-memory",
    "NVMe": "nvme",
    WHILE_BUILT: "host-memory-at-start",
}


def check_formulas(case: Case) -> Iterator[Finding]:
    """Report a model without formulas: nothing is predicted, and checks of memory and step are skipped."""
    try:
        check_known(case.plan.architecture)
    except ValueError:
        yield Finding(
            name="no-formulas",
            severity="hint",
            why=f"There are no formulas for {case.plan.architecture.name}: neither the memory nor the step "
            "time of this plan was checked.",
            number=None,
            change="plan.rehearse(), which counts its memory",
        )


def check_memory_sizes(case: Case) -> Iterator[Finding]:
    """Report every kind of memory that is too small, with the cheapest suggested fix, or of unknown size."""
    if case.memory is None:
        return
    for need in list_memory_needs(case.plan, case.memory):
        # Where recomputation alone is enough, the check of recomputation has the more specific finding.
        if need.short_bytes and not (need.name == "GPU memory" and find_recomputation(case)):
            yield _report_shortage(case, need)
        elif need.room_bytes is None:
            yield _report_unknown(case.plan, need)


def check_tight_fit(case: Case) -> Iterator[Finding]:
    """Report a plan that fits, but so tightly that some of such runs run out of GPU memory.

    The fix is the fastest of a smaller micro-batch, more recomputation and a chunked loss that is not tight.
    """
    memory, recipe, layout = case.memory, case.plan.recipe, case.plan.layout
    if memory is None or not memory.is_tight or not case.has_room:
        return
    # Only changes that keep the loss curve: more recomputation, a smaller micro-batch, the loss in chunks.
    # The fastest of those that are not tight is the fix.
    changes: list[dict[str, object]] = []
    if recipe.recompute in RECOMPUTED:
        more = RECOMPUTED[RECOMPUTED.index(recipe.recompute) + 1 :]
        changes += [{"recompute": value} for value in more if value in list_supported(layout, "recompute")]
    changes += [{"micro_batch_size": size} for size in list_divisors(recipe.micro_batch_size)[:-1]]
    if recipe.loss is None and recipe.kernels is None and "chunked" in list_supported(layout, "loss"):
        changes.append({"loss": "chunked"})
    candidates = evaluate_variants(case.plan, [(change, {}) for change in changes])
    loose = [variant for variant in candidates if not variant.memory.is_tight]
    # A plan that can be launched must not become one that cannot, unless nothing else is enough.
    launched = [variant for variant in loose if case.keeps_launch(variant.plan)]
    best = find_fastest(launched or loose)
    # Without a single fix, a click searches all layouts, then more nodes and smaller models, which takes
    # seconds.
    share = memory.peak_bytes / memory.usable_bytes
    yield Finding(
        name="gpu-nearly-full" if case.plan.on_gpu else "memory-nearly-full",
        severity="warning",
        why=f"The worst rank needs {format_gib(memory.peak_bytes)} of {format_gib(memory.usable_bytes)} GiB, "
        f"{format_percent(share)} of the {name_device(case.plan.cluster)}'s memory: of runs that need over "
        f"{TIGHT_PERCENT} % some run out of it.",
        number=100 * share,
        change=_describe_variant(case, best) + case.describe_slowdown(best.plan)
        if best
        else "No smaller micro-batch and no recomputation is enough",
        plan=best.plan if best else None,
        search=None if best else partial(_find_roomier, case.plan),
    )


def _find_roomier(plan: Plan) -> PlanChange | None:
    """Return the best plan on these GPUs that is not tight, of this framework unless its plans are over a
    third slower; otherwise more nodes, or a smaller model."""
    kept_free = compute_loose_headroom(plan.cluster)
    change = search_change(plan, frameworks=(plan.layout.framework,), headroom_bytes=kept_free)
    # The user chose the framework.
    if change is None or predict_seconds(change.plan) > SAFE * predict_seconds(plan):
        change = search_change(plan, headroom_bytes=kept_free)
    if change is None:
        starts = [PlanChange((), plan), *list_other_frameworks(plan)]
        change = find_on_more_nodes(starts, _has_ease) or find_smaller_model(starts, _has_ease)
    return None if change is None else describe_change(plan, change.plan)


def _has_ease(plan: Plan) -> bool:
    memory = plan.memory()
    return fits(plan, memory) and not memory.is_tight


def _describe_variant(case: Case, variant: Variant) -> str:
    was, now = case.plan.recipe, variant.plan.recipe
    if now.recompute != was.recompute:
        return RECIPE_TEXTS["recompute", now.recompute]
    if now.loss != was.loss:
        return RECIPE_TEXTS["loss", now.loss]
    return f"Micro-batch {now.micro_batch_size} instead of {was.micro_batch_size}"


def _report_shortage(case: Case, need: MemoryNeed) -> Finding:
    assert need.room_bytes is not None
    name, whose = NAMES[need.name], "A node"
    kind: str = need.name
    if need.name == "GPU memory":
        whose = "The worst rank"
        if not case.plan.on_gpu:  # A CPU rank has a part of the host's.
            name = kind = "memory"
    best = _find_sufficient(case)
    is_fix = best is not None and not _is_slow(case, best)
    return Finding(
        name=f"out-of-{name}",
        severity="danger",
        why=f"{whose} needs {format_gib(need.needed_bytes)} GiB of {kind}, and has "
        f"{format_gib(need.room_bytes)}: {format_gib(need.short_bytes)} GiB too little.",
        number=need.short_bytes / 2**30,
        change=best.change if best and is_fix else _describe_no_single_change(case, best),
        plan=best.plan if best and is_fix else None,
        search=None if is_fix else partial(_several_changes, case.plan),
    )


def _is_slow(case: Case, repair: Repair) -> bool:
    """Return whether several changes, or another layout, may well be faster than a single change.

    It costs more than recomputation would, or moves state or activations to the host at a clear cost.
    """
    if case.step is None:
        return False
    offloads = has_offload(repair.plan.layout) or repair.plan.recipe.recompute == "offload"
    return repair.seconds_lost > ((PAYS if offloads else SAFE) - 1) * case.step.seconds


def _describe_no_single_change(case: Case, slow: Repair | None) -> str:
    """Return the text if no change is enough that is fast and keeps the training method; it names one that
    is not."""
    if slow is not None and case.step is not None:
        lost = format_percent(slow.seconds_lost / case.step.seconds)
        return f"{slow.change} is enough, but {lost} slower; several changes may be faster, by {COMBINE}"
    # plan.repairs() leaves out what takes longer.
    limit = "" if case.step is None else f" within {MAX_TIMES_SLOWER:g} times the step time"
    enough = [repair for repair in case.repairs if fits(repair.plan, repair.plan.memory())]
    if enough:
        method = case.plan.recipe.method
        return (
            f"No single change that keeps method={method!r} is enough{limit}; this one is: {enough[0].change}"
        )
    return f"No single change is enough{limit}; several may be, by {COMBINE}"


def _several_changes(plan: Plan) -> PlanChange | None:
    """Return the changes of the button "Make it fit"."""
    fit = make_it_fit(plan)
    return None if fit is None else PlanChange(fit.changes, fit.plan, fit.seconds_lost)


def _find_sufficient(case: Case) -> Repair | None:
    """Return the cheapest change that is sufficient and keeps the training method. Those that cannot be
    launched here come last, if the plan can be, and lower precision, because other checks warn about it."""
    method, precision = case.plan.recipe.method, case.plan.recipe.precision
    same_task = [repair for repair in case.repairs if repair.plan.recipe.method == method]
    # Repairs are sorted by time, so the first one of the plan's own precision is the cheapest.
    enough = [repair for repair in same_task if fits(repair.plan, repair.plan.memory())]
    return min(
        enough,
        key=lambda repair: (
            repair.plan.recipe.precision != precision,
            not case.keeps_launch(repair.plan),
        ),
        default=None,
    )


def _report_unknown(plan: Plan, need: MemoryNeed) -> Finding:
    field = "nvme_bytes" if need.name == "NVMe" else "host_memory_bytes"
    return Finding(
        name=f"{NAMES[need.name]}-not-known",
        severity="hint" if need.name == WHILE_BUILT else "warning",
        why=f"A node needs {format_gib(need.needed_bytes)} GiB of {need.name}, and how much it has is "
        "not known.",
        number=need.needed_bytes / 2**30,
        change=f"Set Cluster.{field}",
        question=Question(plan=plan, field=field),
    )
