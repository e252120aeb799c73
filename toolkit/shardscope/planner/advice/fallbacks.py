"""Alternatives to the recommended plan, and plans that would fit with other settings if nothing fits."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

from shardscope.planner.advice import layout_ladder, words
from shardscope.planner.advice.alternatives import describe_gain, find_alternatives
from shardscope.planner.advice.size_questions import SPLIT
from shardscope.planner.advice.trials import (
    Bench,
    Tried,
    compute_state_bytes,
    find_fastest,
    has_offload,
    is_faster,
    lacks_bf16,
)

if TYPE_CHECKING:
    from shardscope.core.cluster import Cluster
    from shardscope.core.layout import Layout
    from shardscope.core.plan import Plan
    from shardscope.core.recipe import Method
    from shardscope.planner.advice.path import Path

MAX_NODES = 1024


def list_alternatives(path: Path) -> list[tuple[Plan, str]]:
    """Return other plans, the best first, each with its gain and cost compared with the recommended one."""
    advised, bench = path.current, path.bench
    if advised is None:
        return []
    alternatives = _describe_if_any(_try_fp16(bench, advised), bench, "In fp16, which these GPUs have")
    alternatives += try_even_batch(bench)
    settings = try_single_settings(path, advised)
    if path.keeps_on_screen:  # The Memory view offers them for this plan too.
        alternatives += settings
        settings = []
    from_search: list[tuple[Plan, str]] = []
    if path.ranking is not None:
        from_search = find_alternatives(bench, path.ranking, advised, path.familiar)
    if has_offload(advised.plan.layout):
        without = list_plans_without_offload(path)
        alternatives += [*without[:1], *from_search[:1], *without[1:], *from_search[1:]]
    else:
        if advised.report.is_tight and advised.plan.recipe.has_adapters:
            alternatives += _describe_if_any(_try_adapters(bench), bench, "If a base in 4 bits is enough")
        alternatives += from_search
    return alternatives + settings


def list_near_plans(path: Path) -> list[tuple[Plan, str]]:
    """Return plans for the case that nothing fits, the best first.

    First with another global batch, then plans of the search that may fit, then plans for another task or
    more nodes, and last the nearest misses.
    """
    alternatives = try_even_batch(path.bench)
    if path.ranking is not None and path.ranking.num_feasible:
        best = path.ranking.best
        tried = path.bench.try_plan(best.layout, best.recipe)
        if isinstance(tried, Tried):
            may = f"Of {path.ranking.num_evaluated:,} plans of a search one that may fit"
            alternatives += _describe_if_any(tried, path.bench, may, words.describe_unknown_memory(tried))
    alternatives += list_plans_without_offload(path)
    return [*alternatives, *list_nearest_misses(path)]


def try_single_settings(path: Path, advised: Tried) -> list[tuple[Plan, str]]:
    """Return the recommended plan with each setting that makes it faster and leaner, the fastest first."""
    alternatives = []
    for saving in sorted(path.settings, key=lambda saving: saving.seconds_lost):
        tried = path.bench.try_plan(saving.plan.layout, saving.plan.recipe)
        if isinstance(tried, Tried):
            gain = describe_gain(f"{saving.change}, all else as it is", tried, advised)
            alternatives.append((tried.plan, gain))
    return alternatives


def list_nearest_misses(path: Path) -> list[tuple[Plan, str]]:
    """Return the nearest miss of each rung with its missing memory, the nearest first."""
    near = [outcome.nearest for outcome in path.seen.values() if outcome.nearest]
    near.sort(key=lambda tried: tried.shortage)
    return [
        (
            tried.plan,
            f"Nearest miss: {words.name_plan(tried.plan, path.bench.recipe)}: "
            f"{words.describe_shortage(tried)}.",
        )
        for tried in near[:3]
    ]


def list_plans_without_offload(path: Path) -> list[tuple[Plan, str]]:
    """Return plans that fit without offload: 8-bit or bf16 optimizer state, adapters, more nodes.

    More nodes come last for one GPU, first for several.
    """
    bench = path.bench
    alternatives = _describe_if_any(_try_eight_bit(bench), bench, "If the optimizer's state may be in 8 bits")
    alternatives += _describe_if_any(
        _try_bf16_moments(path), bench, "If its moments may be in bf16, as DeepSeek-V3's were"
    )
    if not bench.recipe.has_adapters:
        alternatives += _describe_if_any(_try_adapters(bench), bench, "If adapters are enough")
    elif bench.recipe.method == "lora":
        alternatives += _describe_if_any(_try_adapters(bench), bench, "If a base in 4 bits is enough")
    more = _try_more_nodes(bench, path.current)
    nodes = 0 if more is None else more.plan.cluster.num_nodes
    instead_of = f"With {nodes} nodes instead of {bench.cluster.num_nodes}, and state on the GPUs"
    larger = _describe_if_any(more, bench, instead_of)
    return alternatives + larger if bench.cluster.num_gpus == 1 else larger + alternatives


def _describe_if_any(
    trial: Tried | None, bench: Bench, words_before: str, words_after: str = ""
) -> list[tuple[Plan, str]]:
    if trial is None:
        return []
    figures = f"{words.describe_needs(trial)}, {words.describe_speed(trial.timed)}"
    sentence = f"{words_before}: {words.name_plan(trial.plan, bench.recipe)}; {figures}. {words_after}"
    return [(trial.plan, sentence.strip())]


def _try_fp16(bench: Bench, advised: Tried) -> Tried | None:
    """Return the recommended plan in fp16, for GPUs without bf16; None if they have it, or the plan does not
    fit."""
    if not lacks_bf16(advised.plan):
        return None
    trial = bench.try_plan(advised.plan.layout, replace(advised.plan.recipe, precision="fp16-mixed"))
    return trial if isinstance(trial, Tried) and trial.fits else None


def try_even_batch(bench: Bench) -> list[tuple[Plan, str]]:
    """Return a plan with the nearest global batch that divides evenly over the ranks; empty if the requested
    one does."""
    recipe = bench.recipe
    at_once = bench.cluster.num_gpus * recipe.micro_batch_size
    if recipe.global_batch_size % at_once == 0:
        return []
    batch = max(1, round(recipe.global_batch_size / at_once)) * at_once
    even = Bench(bench.architecture, bench.cluster, replace(recipe, global_batch_size=batch))
    trial = _find_first_that_fits(
        even, [*layout_ladder.build_unsharded().layouts, *_list_sharded_layouts(bench.cluster)]
    )
    return _describe_if_any(
        trial, bench, f"With a global batch of {batch:,}, the nearest that every GPU has an equal part of"
    )


def _try_eight_bit(bench: Bench) -> Tried | None:
    """Return a plan with AdamW's moments in 8-bit blocks (Dettmers et al. 2022), which has the same loss
    curve."""
    if bench.recipe.optimizer != "adamw" or bench.recipe.has_adapters:
        return None
    smaller = Bench(bench.architecture, bench.cluster, replace(bench.recipe, optimizer="adamw_8bit"))
    return _find_first_that_fits(
        smaller, [*layout_ladder.build_unsharded().layouts, *_list_sharded_layouts(bench.cluster)]
    )


def _try_bf16_moments(path: Path) -> Tried | None:
    """Return Megatron-core's nearest miss with both moments in bf16 (DeepSeek-AI 2024, arXiv:2412.19437,
    3.3.2)."""
    outcome = path.seen.get(SPLIT)
    if outcome is None or outcome.nearest is None or outcome.best is not None:
        return None
    options = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
    missed = outcome.nearest.plan
    try:
        layout = replace(missed.layout, **options)
    except ValueError:
        return None
    trial = path.bench.try_plan(layout, missed.recipe)
    return trial if isinstance(trial, Tried) and trial.fits else None


def _try_more_nodes(bench: Bench, advised: Tried | None) -> Tried | None:
    """Return a plan without offload on the fewest nodes, by doubling, that is faster than the recommended one
    as far as times are known, preferably not tight; the global batch grows if it must."""
    state = compute_state_bytes(bench)
    if bench.cluster.gpu.vendor == "cpu" or state is None:
        return None
    tight = None
    doubled = (bench.cluster.num_nodes << power for power in itertools.count(1))
    for nodes in itertools.takewhile(MAX_NODES.__ge__, doubled):
        cluster = replace(bench.cluster, num_nodes=nodes)
        if state > cluster.num_gpus * cluster.usable_bytes_per_gpu:
            continue
        trial = _try_without_offload(bench, cluster)
        if trial is not None and (
            not _get_tokens_per_second(advised)
            or not _get_tokens_per_second(trial)
            or _get_tokens_per_second(trial) > _get_tokens_per_second(advised)
        ):
            if not trial.report.is_tight:
                return trial
            tight = tight or trial
    return tight


def _try_without_offload(bench: Bench, cluster: Cluster) -> Tried | None:
    """Return the simplest layout without offload that is about as fast as the fastest one."""
    least = cluster.num_gpus * bench.recipe.micro_batch_size
    batch = -(-bench.recipe.global_batch_size // least) * least
    larger = Bench(bench.architecture, cluster, replace(bench.recipe, global_batch_size=batch))
    layouts = [*_list_sharded_layouts(cluster), *layout_ladder.build_split_inside_a_node(cluster).layouts]
    outcomes = [*map(larger.try_layout, layouts), layout_ladder.try_megatron(larger)]
    fitting = [outcome.best for outcome in outcomes if outcome.best]
    best = find_fastest(fitting)
    if best is None:
        return None
    as_loose = (tried for tried in fitting if tried.report.is_tight == best.report.is_tight)
    return next((tried for tried in as_loose if not is_faster(best, tried)), best)


def _get_tokens_per_second(tried: Tried | None) -> float:
    """Return the tokens per second of all GPUs; 0 if the time is not known."""
    if tried is None or tried.timed is None:
        return 0.0
    return tried.timed.tokens_per_second_per_gpu * tried.plan.cluster.num_gpus


def _try_adapters(bench: Bench) -> Tried | None:
    """Return LoRA, otherwise QLoRA, in the simplest layout that fits on these GPUs."""
    order: tuple[Method, ...] = ("full", "lora", "qlora")
    tight = None
    for method in order[order.index(bench.recipe.method) + 1 :]:
        smaller = Bench(
            bench.architecture, bench.cluster, replace(bench.recipe, method=method, quantization=None)
        )
        trial = _find_first_that_fits(
            smaller, [*layout_ladder.build_unsharded().layouts, *_list_sharded_layouts(bench.cluster)]
        )
        if trial is not None and not trial.report.is_tight:
            return trial
        tight = tight or trial
    return tight


def _list_sharded_layouts(cluster: Cluster) -> list[Layout]:
    """Return the fully sharded layouts of the rung's first framework."""
    layouts = layout_ladder.build_fully_sharded(cluster).layouts if cluster.num_gpus > 1 else ()
    return [layout for layout in layouts if layout.framework == layouts[0].framework]


def _find_first_that_fits(bench: Bench, layouts: list[Layout]) -> Tried | None:
    return next((best for layout in layouts if (best := bench.try_layout(layout).best)), None)
