"""The questions about memory: from one GPU that holds everything to state on NVMe, and to any layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardscope.core.cluster import name_device
from shardscope.core.number_format import format_count, format_gib
from shardscope.frameworks.registry import is_trained
from shardscope.memory.overheads.libraries import TIGHT_PERCENT
from shardscope.planner.advice import descriptions, layout_ladder
from shardscope.planner.advice.plan_evaluator import (
    EvaluatedPlan,
    Outcome,
    compute_state_bytes,
    is_faster,
    is_state_too_large,
)
from shardscope.planner.advice.plans_from_search import find_simplest
from shardscope.planner.advice.question_path import describe_figures

if TYPE_CHECKING:
    from shardscope.planner.advice.question_path import QuestionPath
    from shardscope.planner.search.ranking import Ranking

TIGHT_FROM, LARGE_FROM = 25e9, 80e9
"""Parameter counts of the usual range "30B to 70B" (Gemma 27B to Qwen 72B), and of "over 70B"."""


def ask_what_trains(path: QuestionPath) -> None:
    """Ask whether all weights or only adapters train, which decides the training state."""
    arch, recipe = path.evaluator.architecture, path.evaluator.recipe
    # The unsharded state puts the answers that follow into proportion.
    state = compute_state_bytes(path.evaluator)
    state_text = "" if state is None else f", {format_gib(state)} GiB of training state in all"
    # With adapters, the size of the frozen base decides, and its number format halves or quarters it.
    if recipe.has_adapters:
        answer = f"Adapters of rank {recipe.adapter_rank} only: fine-tuning."
        number = f"{descriptions.describe_frozen_base(arch, recipe)}{state_text}"
        why = "A frozen base needs no gradients and no optimizer state, so far fewer GPUs are enough."
        if recipe.base_quantization and arch.mixture_of_experts:
            why += (
                " Experts stay as they are: bitsandbytes replaces Linears, and transformers 5 keeps all "
                "experts of a layer in one tensor."
            )
    else:
        answer = "All weights: pretraining, or fine-tuning in full."
        number = f"{descriptions.abbreviate_count(arch.num_parameters)} parameters{state_text}"
        why = (
            "Both hold the same: weights, gradients and the optimizer's state of every parameter. Adapters "
            "(LoRA) would keep gradients and state for a small share of them."
        )
    path.record_turn(
        "", "Fine-tune or pretrain: do all weights train, or only adapters?", answer, number, why, taken=True
    )


def ask_one_gpu(path: QuestionPath) -> None:
    """Ask whether everything fits on one GPU at the requested micro-batch, or with more accumulation or
    recomputation."""
    recipe = path.evaluator.recipe
    micro, rank = recipe.micro_batch_size, name_device(path.evaluator.cluster)
    # 1. DDP, or one process: everything on every GPU.
    outcome = path.choose_rung("whole", layout_ladder.build_unsharded())
    if path.evaluator.cluster.num_gpus == 1:
        how = "one process, and nothing to spread (DDP of one rank)"
        why = f"With one {rank} there is nothing to shard over, so start here."
    else:
        how = f"DDP, a copy on every {rank}"
        why = "The simplest that there is: each rank holds everything, and only gradients travel."
    question = f"Does everything fit on one {rank}, with micro-batch {micro}?"
    # 2. It fits as requested: no second question.
    if outcome.best and not outcome.is_eased:
        path.record_turn("whole", question, f"Yes: {how}.", describe_figures(outcome.best), why, outcome.best)
        path.set_current("whole", outcome.best)
        return
    # 3. Otherwise say why the requested recipe is not enough ...
    if outcome.wanted is None:
        path.record_turn("", question, path.explain_misfit(outcome._replace(nearest=None)), "", why)
    else:
        share = f"over {TIGHT_PERCENT} % of their {rank}'s memory"
        tight = f"Only just: of runs that need {share} some run out of it."
        answer = tight if outcome.wanted.fits else f"No: {descriptions.describe_shortage(outcome.wanted)}."
        path.record_turn(
            "", question, answer, descriptions.describe_needs(outcome.wanted), why, outcome.wanted
        )
    # 4. ... and ask about the changes that leave the loss curve as it is.
    if outcome.best:
        accumulates = outcome.best.plan.recipe.micro_batch_size < micro
        question = (
            "With gradient accumulation over a smaller micro-batch?"
            if accumulates
            else "With layers recomputed in backward, or the loss in chunks?"
        )
        answer = f"Yes: {how}, with {descriptions.describe_recipe_changes(outcome.best, recipe)}."
        why = "Accumulation costs next to nothing, recomputation some time; neither needs another framework."
        path.record_turn("whole", question, answer, describe_figures(outcome.best), why, outcome.best)
        path.set_current("whole", outcome.best)
    elif outcome.nearest and outcome.nearest is not outcome.wanted:
        question = "With gradient accumulation over a smaller micro-batch, or layers recomputed in backward?"
        why = "Both save activations; weights, gradients and the optimizer's state stay what they are."
        answer = path.explain_misfit(outcome)
        # No micro-batch helps where weights, gradients and optimizer alone are too large.
        if is_state_too_large(outcome.nearest):
            answer = f"No: what stays on the {rank} between two steps is too much by itself."
        path.record_turn("", question, answer, path.describe_needs(outcome), why, outcome.nearest)


def ask_sharded_optimizer(path: QuestionPath) -> None:
    """Ask whether the plan fits with sharded gradients and optimizer only, which moves less than full
    sharding."""
    if path.is_settled:
        return
    path.try_rung(
        "gathered_once",
        layout_ladder.build_sharded_optimizer(path.evaluator.cluster),
        f"With gradients and optimizer split over {_count_ranks(path)}, weights whole?",
        "ZeRO-2, which is FSDP2 with reshard_after_forward=False: weights are all-gathered once for a "
        "micro-batch and not twice, so it moves less than full sharding.",
    )


def _count_ranks(path: QuestionPath) -> str:
    return format_count(path.evaluator.cluster.num_gpus, name_device(path.evaluator.cluster))


def ask_full_sharding(path: QuestionPath) -> None:
    """Ask whether the plan fits with full sharding."""
    if path.is_settled:
        return
    path.try_rung(
        "sharded",
        layout_ladder.build_fully_sharded(path.evaluator.cluster),
        "With the weights split as well?",
        "Full sharding (FSDP2, ZeRO-3): each layer is all-gathered when it runs and freed after it, in "
        "forward and again in backward.",
    )


def ask_split_inside_a_node(path: QuestionPath) -> None:
    """Ask about tensor or context parallelism between 30B and 70B if memory is tight, and if full sharding
    did not fit."""
    size, current = path.evaluator.architecture.num_parameters, path.current
    is_tight = current is not None and (not path.is_settled or current.report.is_tight)
    # Above 70B, Megatron-core has a question of its own; below 30B, sharding is usually enough.
    is_middling = TIGHT_FROM <= size <= LARGE_FROM
    rung = layout_ladder.build_split_inside_a_node(path.evaluator.cluster)
    # With one GPU, or a large prime number of them, there is no degree that divides evenly.
    if not rung.layouts or not (current is None or (is_middling and is_tight)):
        return
    device = name_device(path.evaluator.cluster)
    middling = f"{descriptions.abbreviate_count(size)} and tight: with" if is_middling else "With"
    path.try_rung(
        "split",
        rung,
        f"{middling} matrices or sequences split over some {device}s of a node?",
        f"FSDP2 with tensor or context parallelism: a {device} then has a part of each layer, or of each "
        "sequence's activations. Every layer waits for a transfer, so it comes after sharding.",
    )


def ask_offload(path: QuestionPath) -> None:
    """Ask about offload, to the host and then to NVMe, if nothing fits without it."""
    # CPU ranks' memory is the host's already.
    if path.evaluator.cluster.gpu.vendor == "cpu":
        return
    if path.current is None:
        path.try_rung(
            "host",
            layout_ladder.build_on_host(),
            "Only with training state in host memory?",
            "DeepSpeed ZeRO-3 with CPU offload: state crosses the host link, and the host's processors take "
            "the optimizer's step. Slower, but it runs.",
        )
    if path.current is None:
        path.try_rung(
            "nvme",
            layout_ladder.build_on_drives(),
            "Only with training state on NVMe?",
            "DeepSpeed ZeRO-Infinity: the last resort on few GPUs, for drives are slower still.",
        )


ANY_LAYOUT, SIMPLEST = "any_layout", "simplest_layout"
"""Keys of the plan of a search, and of the simplest one if another is advised."""


def ask_any_layout(path: QuestionPath) -> None:
    """Ask whether any layout of a search fits, if no plan of the other questions does."""
    if path.current is not None or path.ranking is None:
        return
    ranking = path.ranking
    question = "Does any other layout fit?"
    why = (
        "The questions try few layouts of each kind, a search tries all degrees of all frameworks: where "
        "these GPUs do not divide the batch, fewer data-parallel ranks may."
    )
    plans = find_simplest(path.evaluator, ranking, path.familiar)
    if plans is None:
        outcome = path.seen[ANY_LAYOUT] = Outcome(None, None, _find_nearest_miss(path, ranking), None)
        answer = "No: no framework has a layout that runs this recipe here."
        if ranking.num_evaluated:
            answer = f"No: none of {ranking.num_evaluated:,} plans of a search fits."
        path.record_turn("", question, answer, path.describe_needs(outcome), why, outcome.nearest)
        return
    simplest, advised = plans
    if advised.plan != simplest.plan:
        path.set_current(SIMPLEST, simplest)
    path.set_current(ANY_LAYOUT, advised)
    reason = _explain_choice(path, simplest, advised, f"of the {ranking.num_feasible:,} plans that fit")
    answer = f"Yes: {path.name_plan(advised)}, {reason}."
    path.record_turn(ANY_LAYOUT, question, answer, describe_figures(advised), why, advised)


def _explain_choice(path: QuestionPath, simplest: EvaluatedPlan, advised: EvaluatedPlan, fitting: str) -> str:
    """Return why ``advised`` is the plan of a search, whose plans that fit are ``fitting``."""
    if advised.plan == simplest.plan:
        return f"the simplest {fitting}"
    if is_faster(advised, simplest):
        return f"{path.compare_plans(advised, simplest)}, the simplest {fitting}"
    # The first of what the advised plan has and the simplest lacks.
    if is_trained(advised.plan) and not is_trained(simplest.plan):
        reason = "cannot be launched here"
    elif descriptions.describe_unknown_memory(simplest) and not descriptions.describe_unknown_memory(advised):
        reason = "needs memory of unknown size"
    else:
        reason = "is tight"
    return f"for the simplest {fitting}, {path.name_plan(simplest)}, {reason}"


def _find_nearest_miss(path: QuestionPath, ranking: Ranking) -> EvaluatedPlan | None:
    if not ranking.misses:
        return None
    plan = ranking.plan(ranking.misses[0].index)
    nearest = path.evaluator.evaluate_plan(plan.layout, plan.recipe)
    return nearest if isinstance(nearest, EvaluatedPlan) else None
