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
    fastest,
    is_faster,
    lacks_bf16,
    offloads,
    state_bytes,
)

if TYPE_CHECKING:
    from shardscope.core.cluster import Cluster
    from shardscope.core.layout import Layout
    from shardscope.core.plan import Plan
    from shardscope.core.recipe import Method
    from shardscope.planner.advice.path import Path

MAX_NODES = 1024


def others(path: Path) -> list[tuple[Plan, str]]:
    """Return other plans, the best first, each with its gain and cost compared with the recommended one."""
    advised, bench = path.current, path.bench
    if advised is None:
        return []
    told = _told_if(_half(bench, advised), bench, "In fp16, which these GPUs have")
    told += with_even_batch(bench)
    settings = with_one_setting(path, advised)
    if path.keeps_on_screen:  # The Memory view offers them for this plan too.
        told += settings
        settings = []
    found: list[tuple[Plan, str]] = []
    if path.ranking is not None:
        found = find_alternatives(bench, path.ranking, advised, path.familiar)
    if offloads(advised.plan.layout):
        without = instead(path)
        told += [*without[:1], *found[:1], *without[1:], *found[1:]]
    else:
        if advised.report.is_tight and advised.plan.recipe.has_adapters:
            told += _told_if(_adapters(bench), bench, "If a base in 4 bits is enough")
        told += found
    return told + settings


def where_nothing_fits(path: Path) -> list[tuple[Plan, str]]:
    """Return plans for the case that nothing fits, the best first.

    First with another global batch, then plans of the search that may fit, then plans for another task or
    more nodes, and last the nearest misses.
    """
    told = with_even_batch(path.bench)
    if path.ranking is not None and path.ranking.num_feasible:
        best = path.ranking.best
        tried = path.bench.tried(best.layout, best.recipe)
        if isinstance(tried, Tried):
            may = f"Of {path.ranking.num_evaluated:,} plans of a search one that may fit"
            told += _told_if(tried, path.bench, may, words.unsaid(tried))
    told += instead(path)
    return [*told, *misses(path)]


def with_one_setting(path: Path, advised: Tried) -> list[tuple[Plan, str]]:
    """Return the recommended plan with each setting that makes it faster and leaner, the fastest first."""
    told = []
    for saving in sorted(path.settings, key=lambda saving: saving.seconds_lost):
        tried = path.bench.tried(saving.plan.layout, saving.plan.recipe)
        if isinstance(tried, Tried):
            gain = describe_gain(f"{saving.change}, all else as it is", tried, advised)
            told.append((tried.plan, gain))
    return told


def misses(path: Path) -> list[tuple[Plan, str]]:
    """Return the nearest miss of each rung with its missing memory, the nearest first."""
    near = [outcome.nearest for outcome in path.seen.values() if outcome.nearest]
    near.sort(key=lambda tried: tried.shortage)
    return [
        (
            tried.plan,
            f"Nearest miss: {words.named(tried.plan, path.bench.recipe)}: {words.lacks(tried)}.",
        )
        for tried in near[:3]
    ]


def instead(path: Path) -> list[tuple[Plan, str]]:
    """Return plans that fit without offload: 8-bit or bf16 optimizer state, adapters, more nodes.

    More nodes come last for one GPU, first for several.
    """
    bench = path.bench
    told = _told_if(_eight_bit(bench), bench, "If the optimizer's state may be in 8 bits")
    told += _told_if(_half_moments(path), bench, "If its moments may be in bf16, as DeepSeek-V3's were")
    if not bench.recipe.has_adapters:
        told += _told_if(_adapters(bench), bench, "If adapters are enough")
    elif bench.recipe.method == "lora":
        told += _told_if(_adapters(bench), bench, "If a base in 4 bits is enough")
    more = _more_nodes(bench, path.current)
    nodes = 0 if more is None else more.plan.cluster.num_nodes
    instead_of = f"With {nodes} nodes instead of {bench.cluster.num_nodes}, and state on the GPUs"
    larger = _told_if(more, bench, instead_of)
    return told + larger if bench.cluster.num_gpus == 1 else larger + told


def _told_if(
    found: Tried | None, bench: Bench, words_before: str, words_after: str = ""
) -> list[tuple[Plan, str]]:
    if found is None:
        return []
    figures = f"{words.needs(found)}, {words.pace(found.timed)}"
    sentence = f"{words_before}: {words.named(found.plan, bench.recipe)}; {figures}. {words_after}"
    return [(found.plan, sentence.strip())]


def _half(bench: Bench, advised: Tried) -> Tried | None:
    """Return the recommended plan in fp16, for GPUs without bf16; None if they have it, or the plan does not
    fit."""
    if not lacks_bf16(advised.plan):
        return None
    found = bench.tried(advised.plan.layout, replace(advised.plan.recipe, precision="fp16-mixed"))
    return found if isinstance(found, Tried) and found.fits else None


def with_even_batch(bench: Bench) -> list[tuple[Plan, str]]:
    """Return a plan with the nearest global batch that divides evenly over the ranks; empty if the requested
    one does."""
    recipe = bench.recipe
    at_once = bench.cluster.num_gpus * recipe.micro_batch_size
    if recipe.global_batch_size % at_once == 0:
        return []
    batch = max(1, round(recipe.global_batch_size / at_once)) * at_once
    even = Bench(bench.architecture, bench.cluster, replace(recipe, global_batch_size=batch))
    found = _first_that_fits(even, [*layout_ladder.whole().layouts, *_sharded(bench.cluster)])
    return _told_if(
        found, bench, f"With a global batch of {batch:,}, the nearest that every GPU has an equal part of"
    )


def _eight_bit(bench: Bench) -> Tried | None:
    """Return a plan with AdamW's moments in 8-bit blocks (Dettmers et al. 2022), which has the same loss
    curve."""
    if bench.recipe.optimizer != "adamw" or bench.recipe.has_adapters:
        return None
    smaller = Bench(bench.architecture, bench.cluster, replace(bench.recipe, optimizer="adamw_8bit"))
    return _first_that_fits(smaller, [*layout_ladder.whole().layouts, *_sharded(bench.cluster)])


def _half_moments(path: Path) -> Tried | None:
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
    found = path.bench.tried(layout, missed.recipe)
    return found if isinstance(found, Tried) and found.fits else None


def _more_nodes(bench: Bench, advised: Tried | None) -> Tried | None:
    """Return a plan without offload on the fewest nodes, by doubling, that is faster than the recommended one
    as far as times are known, preferably not tight; the global batch grows if it must."""
    state = state_bytes(bench)
    if bench.cluster.gpu.vendor == "cpu" or state is None:
        return None
    tight = None
    doubled = (bench.cluster.num_nodes << power for power in itertools.count(1))
    for nodes in itertools.takewhile(MAX_NODES.__ge__, doubled):
        cluster = replace(bench.cluster, num_nodes=nodes)
        if state > cluster.num_gpus * cluster.usable_bytes_per_gpu:
            continue
        found = _on_the_gpus(bench, cluster)
        if found is not None and (not _pace(advised) or not _pace(found) or _pace(found) > _pace(advised)):
            if not found.report.is_tight:
                return found
            tight = tight or found
    return tight


def _on_the_gpus(bench: Bench, cluster: Cluster) -> Tried | None:
    """Return the simplest layout without offload that is about as fast as the fastest one."""
    least = cluster.num_gpus * bench.recipe.micro_batch_size
    batch = -(-bench.recipe.global_batch_size // least) * least
    larger = Bench(bench.architecture, cluster, replace(bench.recipe, global_batch_size=batch))
    layouts = [*_sharded(cluster), *layout_ladder.split_inside_a_node(cluster).layouts]
    outcomes = [*map(larger.outcome, layouts), layout_ladder.megatron(larger)]
    fitting = [outcome.best for outcome in outcomes if outcome.best]
    best = fastest(fitting)
    if best is None:
        return None
    as_loose = (tried for tried in fitting if tried.report.is_tight == best.report.is_tight)
    return next((tried for tried in as_loose if not is_faster(best, tried)), best)


def _pace(tried: Tried | None) -> float:
    """Return the tokens per second of all GPUs; 0 if the time is not known."""
    if tried is None or tried.timed is None:
        return 0.0
    return tried.timed.tokens_per_second_per_gpu * tried.plan.cluster.num_gpus


def _adapters(bench: Bench) -> Tried | None:
    """Return LoRA, otherwise QLoRA, in the simplest layout that fits on these GPUs."""
    order: tuple[Method, ...] = ("full", "lora", "qlora")
    tight = None
    for method in order[order.index(bench.recipe.method) + 1 :]:
        smaller = Bench(
            bench.architecture, bench.cluster, replace(bench.recipe, method=method, quantization=None)
        )
        found = _first_that_fits(smaller, [*layout_ladder.whole().layouts, *_sharded(bench.cluster)])
        if found is not None and not found.report.is_tight:
            return found
        tight = tight or found
    return tight


def _sharded(cluster: Cluster) -> list[Layout]:
    """Return the fully sharded layouts of the rung's first framework."""
    layouts = layout_ladder.sharded(cluster).layouts if cluster.num_gpus > 1 else ()
    return [layout for layout in layouts if layout.framework == layouts[0].framework]


def _first_that_fits(bench: Bench, layouts: list[Layout]) -> Tried | None:
    return next((best for layout in layouts if (best := bench.outcome(layout).best)), None)
