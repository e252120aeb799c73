"""Alternatives to the recommended plan, and plans that would fit with other settings if nothing fits."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from shardscope.core.cluster import choose_mixed_precision, name_device
from shardscope.core.serialization import replace_fields
from shardscope.frameworks.registry import is_trained
from shardscope.planner.advice import descriptions, layout_ladder
from shardscope.planner.advice.plan_evaluator import (
    PAYS,
    SAFE,
    WORTH_A_SETTING,
    EvaluatedPlan,
    Outcome,
    PlanEvaluator,
    compute_state_bytes,
    find_fastest,
    has_offload,
    is_faster,
    lacks_bf16,
)
from shardscope.planner.advice.plans_from_search import (
    describe_alternative,
    describe_gain,
    describe_obstacles,
    find_alternatives,
    find_launched,
    find_simplest,
    search_all_layouts,
)
from shardscope.planner.advice.size_questions import SPLIT
from shardscope.planner.repairs.savings import find_savings

if TYPE_CHECKING:
    from shardscope.core.cluster import Cluster
    from shardscope.core.layout import Layout
    from shardscope.core.plan import Plan
    from shardscope.core.recipe import Method
    from shardscope.planner.advice.question_path import QuestionPath

MAX_NODES = 1024
IN_FP16 = "In fp16, which these GPUs have"


def list_alternatives(path: QuestionPath) -> list[tuple[Plan, str]]:
    """Return other plans, the best first, each with its gain and cost compared with the recommended one."""
    advised, evaluator = path.current, path.evaluator
    if advised is None:
        return []
    # First what corrects the request itself: a format that the GPUs lack, a batch that does not divide.
    alternatives = _describe_if_any(_try_fp16(evaluator, advised), evaluator)
    alternatives += _list_mixed_precision(evaluator, advised)
    alternatives += try_even_batch(evaluator, advised)
    alternatives += _list_launchable(path, advised)
    settings = try_single_settings(path, advised)
    runs = [one for one in settings if is_trained(one[0]) or not is_trained(advised.plan)]
    clear = [one for one in runs if _is_faster_plan(one[0], advised)]
    if path.keeps_on_screen:  # The Memory view offers them for this plan too.
        alternatives += settings
        settings, clear = [], []
    else:
        alternatives += _try_settings_on_screen(path, advised)
    # Then what is better in one respect: faster or leaner plans of the search over all layouts.
    from_search: list[tuple[Plan, str]] = []
    if path.ranking is not None:
        from_search = find_alternatives(evaluator, path.ranking, advised, path.familiar)
        listed = [plan for plan, _ in alternatives]
        from_search = [one for one in from_search if one[0] not in listed]
    faster = [one for one in from_search if _is_faster_plan(one[0], advised)]
    leaner = [one for one in from_search if one not in faster]
    if has_offload(advised.plan.layout):
        # Only the first two of this list are shown. A plan that is faster on these GPUs comes first. A plan
        # with offload is slow, so ways to do without it alternate with the search's leaner plans.
        without = list_plans_without_offload(path)
        alternatives += [*faster, *without[:1], *leaner[:1], *without[1:], *leaner[1:]]
    else:
        if advised.report.is_tight and advised.plan.recipe.has_adapters:
            quantized = _try_adapters(_without_lacking_bf16(evaluator))
            alternatives += _describe_if_any(quantized, evaluator, "If a base in 4 bits is enough")
        if advised.report.is_tight:
            alternatives += from_search
            if all(plan.memory().is_tight for plan, _ in from_search):
                alternatives += _list_looser_optimizers(evaluator)
        else:
            # A setting that makes the recommended plan clearly faster matters more than free memory.
            alternatives += [*faster, *clear, *leaner]
            settings = [one for one in settings if one not in clear]
    return alternatives + settings


def _list_mixed_precision(evaluator: PlanEvaluator, advised: EvaluatedPlan) -> list[tuple[Plan, str]]:
    """Return the recommended layout in mixed precision, for fp32 on GPUs that are clearly faster with it."""
    if evaluator.recipe.precision != "fp32" or not advised.plan.on_gpu:
        return []
    mixed = choose_mixed_precision(evaluator.cluster.gpu)
    in_mixed = _replace_recipe(evaluator, precision=mixed)
    best = in_mixed.evaluate_layout(advised.plan.layout).best
    best = best and in_mixed.with_room(best)
    if best is None or not is_faster(best, advised) or (best.report.is_tight and not advised.report.is_tight):
        return []
    kind, gain = mixed.removesuffix("-mixed"), describe_alternative(best, advised, evaluator)
    return [(best.plan, f"In {kind}, with trained weights and optimizer still in fp32: {gain}")]


def _list_launchable(path: QuestionPath, advised: EvaluatedPlan) -> list[tuple[Plan, str]]:
    """Return the fastest plan so far, or of the search, that can be launched here, if the recommended one
    cannot and is not over a third faster."""
    if is_trained(advised.plan) or advised.seconds is None:
        return []
    evaluator = path.evaluator
    runs = [one for one in evaluator.fitting.values() if is_trained(one.plan)]
    searched = (
        None if path.ranking is None else find_launched(evaluator, path.ranking, advised, path.familiar)
    )
    best = find_fastest(runs if searched is None else [*runs, searched])
    if best is None or best.seconds is None:
        return []
    best = evaluator.with_overlap(best, path.familiar)
    if is_faster(advised, best, SAFE):
        return []
    gain = describe_gain(descriptions.name_plan(best.plan, evaluator.recipe), best, advised)
    unknown = descriptions.describe_unknown_memory(best)
    return [(best.plan, f"{gain} It can be launched here. {unknown}".strip())]


def _list_looser_optimizers(requested: PlanEvaluator) -> list[tuple[Plan, str]]:
    """Return a plan with 8-bit optimizer state that is not tight; empty if there is none."""
    trial = _try_eight_bit(_without_lacking_bf16(requested))
    if trial is None or trial.report.is_tight:
        return []
    return _describe_if_any(trial, requested, "If the optimizer's state may be in 8 bits")


def _is_faster_plan(plan: Plan, advised: EvaluatedPlan) -> bool:
    return advised.seconds is not None and plan.step().seconds * PAYS < advised.seconds


def list_near_plans(path: QuestionPath) -> list[tuple[Plan, str]]:
    """Return plans for the case that nothing fits, the best first.

    First in a number format that the GPUs have and with another global batch, then plans for another task or
    more nodes, and last the nearest misses.
    """
    # The nearest batch that divides may be all that is needed, so it comes first; before it, a format that
    # the GPUs have, without which no search could try all layouts.
    alternatives = _search_in_fp16(path)
    alternatives += try_even_batch(path.evaluator, None)
    alternatives += list_plans_without_offload(path)
    return [*alternatives, *list_nearest_misses(path)]


def try_single_settings(path: QuestionPath, advised: EvaluatedPlan) -> list[tuple[Plan, str]]:
    """Return the recommended plan with each setting that makes it faster and leaner, the fastest first."""
    alternatives = []
    for saving in sorted(path.settings, key=lambda saving: saving.seconds_lost):
        evaluated = path.evaluator.evaluate_plan(saving.plan.layout, saving.plan.recipe)
        if isinstance(evaluated, EvaluatedPlan):
            gain = describe_gain(f"{saving.change}, all else as it is", evaluated, advised)
            alternatives.append((evaluated.plan, f"{gain} {describe_obstacles(evaluated, advised)}".strip()))
    return alternatives


def _try_settings_on_screen(path: QuestionPath, advised: EvaluatedPlan) -> list[tuple[Plan, str]]:
    """Return the plan on screen with the setting that makes it fit with room and faster than ``advised``.

    The Memory view offers it for the plan on screen: without it, the advice would contradict that view.
    """
    mine = path.on_screen
    if mine is None or mine.seconds is None or not mine.fits:
        return []
    for saving in sorted(find_savings(mine.plan, mine.report), key=lambda saving: saving.seconds_lost):
        evaluated = path.evaluator.evaluate_plan(saving.plan.layout, saving.plan.recipe)
        if (
            isinstance(evaluated, EvaluatedPlan)
            and not evaluated.report.is_tight
            and is_faster(evaluated, advised, WORTH_A_SETTING)
        ):
            gain = describe_gain(f"{saving.change} in the current plan", evaluated, advised)
            return [(evaluated.plan, f"{gain} {describe_obstacles(evaluated, advised)}".strip())]
    return []


def list_nearest_misses(path: QuestionPath) -> list[tuple[Plan, str]]:
    """Return the nearest miss of each rung with its missing memory, the nearest first."""
    near = [outcome.nearest for outcome in path.seen.values() if outcome.nearest]
    near.sort(key=lambda evaluated: evaluated.shortage)
    return [
        (
            evaluated.plan,
            f"Nearest miss: {descriptions.name_plan(evaluated.plan, path.evaluator.recipe)}: "
            f"{descriptions.describe_shortage(evaluated)}.",
        )
        for evaluated in near[:3]
    ]


def list_plans_without_offload(path: QuestionPath) -> list[tuple[Plan, str]]:
    """Return plans that fit without offload: 8-bit or bf16 optimizer state, adapters, more nodes.

    More nodes come last for one GPU, first for several. On GPUs without bf16 all plans are in fp16,
    which has a time.
    """
    requested = path.evaluator
    evaluator = _without_lacking_bf16(requested)
    # Ordered by how little they change the training: number format of the state, then adapters.
    alternatives = _describe_if_any(
        _try_eight_bit(evaluator), requested, "If the optimizer's state may be in 8 bits"
    )
    alternatives += _describe_if_any(
        _try_bf16_moments(path), requested, "If its moments may be in bf16, as DeepSeek-V3's were"
    )
    if not evaluator.recipe.has_adapters:
        alternatives += _describe_if_any(_try_adapters(evaluator), requested, "If adapters are enough")
    elif evaluator.recipe.method == "lora":
        alternatives += _describe_if_any(_try_adapters(evaluator), requested, "If a base in 4 bits is enough")
    # Owners of a single GPU seldom have nodes to add; a cluster usually can grow.
    more = _try_more_nodes(evaluator, _get_timed(requested, path.current))
    nodes = 0 if more is None else more.plan.cluster.num_nodes
    instead_of = f"With {nodes} nodes instead of {evaluator.cluster.num_nodes}, and state on the GPUs"
    larger = _describe_if_any(more, requested, instead_of)
    return alternatives + larger if evaluator.cluster.num_gpus == 1 else larger + alternatives


def _describe_if_any(
    trial: EvaluatedPlan | None, requested: PlanEvaluator, words_before: str = ""
) -> list[tuple[Plan, str]]:
    """Return a trial with its figures after the words, which begin with the number format if that is another
    one than requested; empty without a trial."""
    if trial is None:
        return []
    if trial.plan.recipe.precision != requested.recipe.precision:
        words_before = (
            f"{IN_FP16}, and {words_before[0].lower()}{words_before[1:]}" if words_before else IN_FP16
        )
    figures = f"{descriptions.describe_needs(trial)}, {descriptions.describe_speed(trial)}"
    name = descriptions.name_plan(trial.plan, requested.recipe)
    tight = ", which is tight" if trial.report.is_tight else ""
    return [(trial.plan, f"{words_before}: {name}; {figures}{tight}.")]


def _try_fp16(evaluator: PlanEvaluator, advised: EvaluatedPlan) -> EvaluatedPlan | None:
    """Return the recommended layout in fp16, for GPUs without bf16; None if they have it, or the plan does
    not fit."""
    if not lacks_bf16(advised.plan.recipe, evaluator.cluster):
        return None
    # In fp16 a time is known, so that the recomputation and the micro-batch are chosen again.
    in_fp16 = _without_lacking_bf16(evaluator)
    best = in_fp16.evaluate_layout(advised.plan.layout).best
    return None if best is None else in_fp16.with_room(best)


def _get_timed(evaluator: PlanEvaluator, advised: EvaluatedPlan | None) -> EvaluatedPlan | None:
    """Return the recommended plan, in fp16 for GPUs without bf16, in which it has no time to compare with."""
    return None if advised is None else _try_fp16(evaluator, advised) or advised


def _search_in_fp16(path: QuestionPath) -> list[tuple[Plan, str]]:
    """Return the plan to advise in fp16 with the requested batch, for GPUs without bf16; empty if they have
    it, or no layout fits."""
    if not lacks_bf16(path.evaluator.recipe, path.evaluator.cluster):
        return []
    evaluator = _without_lacking_bf16(path.evaluator)
    ranking = search_all_layouts(evaluator, path.progress)
    plans = None if ranking is None else find_simplest(evaluator, ranking, path.familiar)
    return [] if plans is None else _describe_if_any(plans[1], path.evaluator)


def _without_lacking_bf16(evaluator: PlanEvaluator) -> PlanEvaluator:
    """Return the evaluator of the same question in fp16 for GPUs without bf16, otherwise the same one."""
    if not lacks_bf16(evaluator.recipe, evaluator.cluster):
        return evaluator
    return _replace_recipe(evaluator, precision="fp16-mixed")


def _replace_recipe(evaluator: PlanEvaluator, **changed: object) -> PlanEvaluator:
    """Return an evaluator of the same question with other recipe fields."""
    recipe = replace_fields(evaluator.recipe, changed)
    return PlanEvaluator(evaluator.architecture, evaluator.cluster, recipe)


def try_even_batch(evaluator: PlanEvaluator, advised: EvaluatedPlan | None) -> list[tuple[Plan, str]]:
    """Return a plan with the nearest global batch that divides evenly over the ranks.

    Empty if the requested batch does, or if the plan takes much longer (:data:`SAFE`) per token than the
    recommended one, if there is one.
    """
    recipe = evaluator.recipe
    # Every rank has the same number of whole micro-batches, so the batch must be a multiple of all of them
    # together.
    at_once = evaluator.cluster.num_gpus * recipe.micro_batch_size
    if recipe.global_batch_size % at_once == 0:
        return []
    batch = max(1, round(recipe.global_batch_size / at_once)) * at_once
    # A plan in a format that the GPUs lack would be no help.
    even = _replace_recipe(_without_lacking_bf16(evaluator), global_batch_size=batch)
    words_before = (
        f"With a global batch of {batch:,}, the nearest that every {name_device(evaluator.cluster)} has an "
        "equal part of"
    )
    trial = _find_simplest_fast_plan(even)
    # An even batch serves the speed.
    if _get_tokens_per_second(_get_timed(evaluator, advised)) > SAFE * _get_tokens_per_second(trial) > 0:
        return []
    return _describe_if_any(trial, evaluator, words_before)


def _try_eight_bit(evaluator: PlanEvaluator) -> EvaluatedPlan | None:
    """Return a plan with AdamW's moments in 8-bit blocks (Dettmers et al. 2022), which has the same loss
    curve."""
    if evaluator.recipe.optimizer != "adamw" or evaluator.recipe.has_adapters:
        return None
    smaller = _replace_recipe(evaluator, optimizer="adamw_8bit")
    return _find_simplest_fast_plan(smaller)


def _try_bf16_moments(path: QuestionPath) -> EvaluatedPlan | None:
    """Return Megatron-core's nearest miss with both moments in bf16 (DeepSeek-AI 2024, arXiv:2412.19437,
    3.3.2)."""
    outcome = path.seen.get(SPLIT)
    if lacks_bf16(path.evaluator.recipe, path.evaluator.cluster):
        return None
    if outcome is None or outcome.nearest is None or outcome.best is not None:
        return None
    # Only Megatron-core's precision-aware optimizer can store its moments in bf16 (megatron-core 0.16,
    # core/optimizer/optimizer_config.py, exp_avg_dtype).
    options = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
    missed = outcome.nearest.plan
    try:
        layout = replace(missed.layout, **options)
    except ValueError:
        return None
    return path.evaluator.evaluate_fitting_plan(layout, missed.recipe)


def _try_more_nodes(evaluator: PlanEvaluator, advised: EvaluatedPlan | None) -> EvaluatedPlan | None:
    """Return a plan without offload on the fewest nodes, by doubling, that is faster than the recommended one
    as far as times are known, preferably not tight; the global batch grows if it must."""
    state = compute_state_bytes(evaluator)
    if evaluator.cluster.gpu.vendor == "cpu" or state is None:
        return None
    tight = None
    doubled = (evaluator.cluster.num_nodes << power for power in itertools.count(1))
    for nodes in itertools.takewhile(MAX_NODES.__ge__, doubled):
        cluster = replace(evaluator.cluster, num_nodes=nodes)
        # The training state alone is too large for all GPUs together: skip the evaluation, which takes
        # longer.
        if state > cluster.num_gpus * cluster.usable_bytes_per_gpu:
            continue
        trial = _try_without_offload(evaluator, cluster)
        # More nodes must pay: a plan on them that is slower than the offloaded one is no alternative.
        if trial is not None and (
            not _get_tokens_per_second(advised)
            or not _get_tokens_per_second(trial)
            or _get_tokens_per_second(trial) > _get_tokens_per_second(advised)
        ):
            if not trial.report.is_tight:
                return trial
            tight = tight or trial
    return tight


def _try_without_offload(evaluator: PlanEvaluator, cluster: Cluster) -> EvaluatedPlan | None:
    """Return the simplest layout without offload that is about as fast as the fastest one."""
    # Round the batch up: with more ranks than sequences, some would have no work.
    least = cluster.num_gpus * evaluator.recipe.micro_batch_size
    batch = -(-evaluator.recipe.global_batch_size // least) * least
    larger = PlanEvaluator(
        evaluator.architecture, cluster, replace(evaluator.recipe, global_batch_size=batch)
    )
    layouts = [*_list_sharded_layouts(cluster), *layout_ladder.build_split_inside_a_node(cluster).layouts]
    outcomes = [*map(larger.evaluate_layout, layouts), layout_ladder.try_megatron(larger)]
    return _choose_simplest_fast_plan(larger, outcomes)


def _find_simplest_fast_plan(evaluator: PlanEvaluator) -> EvaluatedPlan | None:
    """Return the simplest layout, unsharded or fully sharded, that is about as fast as the fastest one."""
    layouts = [*layout_ladder.build_unsharded().layouts, *_list_sharded_layouts(evaluator.cluster)]
    return _choose_simplest_fast_plan(evaluator, map(evaluator.evaluate_layout, layouts))


def _choose_simplest_fast_plan(evaluator: PlanEvaluator, outcomes: Iterable[Outcome]) -> EvaluatedPlan | None:
    """Return the first plan that fits and is about as fast as the fastest one, which is preferably not
    tight; None if none fits."""
    # With larger micro-batches, as the recommended plan, which they are compared with.
    fitting = [evaluator.with_room(outcome.best) for outcome in outcomes if outcome.best]
    best = find_fastest(fitting)
    if best is None:
        return None
    # Do not prefer a simpler layout that is tight to a faster one that is not.
    as_loose = (evaluated for evaluated in fitting if evaluated.report.is_tight == best.report.is_tight)
    return next((evaluated for evaluated in as_loose if not is_faster(best, evaluated)), best)


def _get_tokens_per_second(evaluated: EvaluatedPlan | None) -> float:
    """Return the tokens per second of all GPUs; 0 if the time is not known."""
    if evaluated is None or evaluated.timed is None:
        return 0.0
    return evaluated.timed.tokens_per_second_per_gpu * evaluated.plan.cluster.num_gpus


def _try_adapters(evaluator: PlanEvaluator) -> EvaluatedPlan | None:
    """Return LoRA, otherwise QLoRA, in the simplest fast layout that fits on these GPUs."""
    order: tuple[Method, ...] = ("full", "lora", "qlora")
    tight = None
    for method in order[order.index(evaluator.recipe.method) + 1 :]:
        smaller = _replace_recipe(evaluator, method=method, quantization=None)
        trial = _find_simplest_fast_plan(smaller)
        # LoRA is preferred to QLoRA, whose base must be dequantized in each forward, but not if it is tight.
        if trial is not None and not trial.report.is_tight:
            return trial
        tight = tight or trial
    return tight


def _list_sharded_layouts(cluster: Cluster) -> list[Layout]:
    """Return the fully sharded layouts of the rung's first framework."""
    layouts = layout_ladder.build_fully_sharded(cluster).layouts if cluster.num_gpus > 1 else ()
    return [layout for layout in layouts if layout.framework == layouts[0].framework]
