"""What else there is beside the plan that was advised, and what would do where nothing fits."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

from shardscope.planner.advising import rungs, words
from shardscope.planner.advising.bench import (
    Bench,
    Tried,
    fastest,
    is_faster,
    lacks_bf16,
    offloads,
    state_bytes,
)
from shardscope.planner.advising.large import SPLIT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardscope.cluster import Cluster
    from shardscope.layout import Layout
    from shardscope.plan import Plan
    from shardscope.planner.advising.path import Path
    from shardscope.recipe import Method

MAX_OTHERS = 6
MAX_NODES = 1024
GIVES = {
    "whole": "nothing to set up, and every rank holds everything",
    "gathered_once": "weights stay whole for a step, so less is gathered",
    "sharded": "least memory without offload, for a gather of every layer",
    "split": "layers or sequences split inside a node as well",
    "host": "state in host memory, for a slower step",
    "nvme": "state on drives, for the slowest step",
    SPLIT: "layers split in a node, pipeline across, in Megatron-core's own modules",
}
"""What a rung gives and costs."""


def others(path: Path) -> list[tuple[Plan, str]]:
    """Other plans that fit on these GPUs, beside the advised one; where that offloads, what would not."""
    advised = path.current
    if advised is None:
        return []
    found: list[tuple[Tried, str]] = []
    for key, outcome in path.seen.items():
        if outcome.best is None or outcome.best.plan.layout == advised.plan.layout:
            continue
        found.append((outcome.best, GIVES[key]))
    found += [(tried, "the same in another framework") for tried in _same_elsewhere(path)]
    told = [
        (tried.plan, f"{words.named(tried.plan, path.bench.recipe)}: {gives}; {_beside(tried, advised)}.")
        for tried, gives in found[:MAX_OTHERS]
    ]
    told += _told_if(_half(path.bench, advised), path.bench, "In fp16, which these cards have")
    told += with_even_batch(path.bench)
    if offloads(advised.plan.layout):
        told += instead(path)
    elif advised.report.is_tight and advised.plan.recipe.has_adapters:
        told += _told_if(_adapters(path.bench), path.bench, "If a base in 4 bits is enough")
    return told


def _same_elsewhere(path: Path) -> Iterator[Tried]:
    """The rung of the plan in other frameworks, with the plan's recipe."""
    rung = {"gathered_once": rungs.gathered_once, "sharded": rungs.sharded}.get(path.rung)
    advised = path.current
    if rung is None or advised is None:
        return
    for layout in rung(path.bench.cluster).layouts:
        if layout.framework != advised.plan.layout.framework:
            found = path.bench.tried(layout, advised.plan.recipe)
            if isinstance(found, Tried) and found.fits:
                yield found


def _beside(tried: Tried, advised: Tried) -> str:
    return f"{words.needs(tried)}, {words.compared(tried, advised)}"


def misses(path: Path) -> list[tuple[Plan, str]]:
    """Of each way of spreading what lacks least, the nearest first."""
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
    """What would do without offload: the optimizer's state in fewer bits, adapters, more nodes."""
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
    return told + _told_if(more, bench, instead_of)


def _told_if(found: Tried | None, bench: Bench, words_before: str) -> list[tuple[Plan, str]]:
    if found is None:
        return []
    figures = f"{words.needs(found)}, {words.pace(found.timed)}"
    return [(found.plan, f"{words_before}: {words.named(found.plan, bench.recipe)}; {figures}.")]


def _half(bench: Bench, advised: Tried) -> Tried | None:
    """The advised plan in fp16, on cards that have no bf16."""
    if not lacks_bf16(advised.plan):
        return None
    found = bench.tried(advised.plan.layout, replace(advised.plan.recipe, precision="fp16-mixed"))
    return found if isinstance(found, Tried) and found.fits else None


def with_even_batch(bench: Bench) -> list[tuple[Plan, str]]:
    """The nearest global batch of which each rank takes whole micro-batches, where the wanted one is none."""
    recipe = bench.recipe
    at_once = bench.cluster.num_gpus * recipe.micro_batch_size
    if recipe.global_batch_size % at_once == 0:
        return []
    batch = max(1, round(recipe.global_batch_size / at_once)) * at_once
    even = Bench(bench.architecture, bench.cluster, replace(recipe, global_batch_size=batch))
    found = _first_that_fits(even, [*rungs.whole().layouts, *_sharded(bench.cluster)])
    return _told_if(
        found, bench, f"With a global batch of {batch:,}, the nearest that every GPU has an equal part of"
    )


def _eight_bit(bench: Bench) -> Tried | None:
    """AdamW's moments in blocks of 8 bits (Dettmers et al. 2022), which learns the same."""
    if bench.recipe.optimizer != "adamw" or bench.recipe.has_adapters:
        return None
    smaller = Bench(bench.architecture, bench.cluster, replace(bench.recipe, optimizer="adamw_8bit"))
    return _first_that_fits(smaller, [*rungs.whole().layouts, *_sharded(bench.cluster)])


def _half_moments(path: Path) -> Tried | None:
    """Megatron-core's nearest miss with both moments in bf16 (DeepSeek-AI 2024, arXiv:2412.19437, 3.3.2)."""
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
    """The fewest nodes, by doubling, whose GPUs have room for its state, not tightly if that can be, and that
    are faster than what is advised, as far as times are known; the batch grows where it must."""
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
    """The simplest layout without offload that is about as fast as the fastest of them."""
    least = cluster.num_gpus * bench.recipe.micro_batch_size
    batch = -(-bench.recipe.global_batch_size // least) * least
    larger = Bench(bench.architecture, cluster, replace(bench.recipe, global_batch_size=batch))
    layouts = [*_sharded(cluster), *rungs.split_inside_a_node(cluster).layouts]
    outcomes = [*map(larger.outcome, layouts), rungs.megatron(larger)]
    fitting = [outcome.best for outcome in outcomes if outcome.best]
    best = fastest(fitting)
    if best is None:
        return None
    as_loose = (tried for tried in fitting if tried.report.is_tight == best.report.is_tight)
    return next((tried for tried in as_loose if not is_faster(best, tried)), best)


def _pace(tried: Tried | None) -> float:
    """Tokens a second of all GPUs; 0 where no time is known."""
    if tried is None or tried.timed is None:
        return 0.0
    return tried.timed.tokens_per_second_per_gpu * tried.plan.cluster.num_gpus


def _adapters(bench: Bench) -> Tried | None:
    """LoRA, or else QLoRA, in the simplest layout that fits on these GPUs."""
    order: tuple[Method, ...] = ("full", "lora", "qlora")
    tight = None
    for method in order[order.index(bench.recipe.method) + 1 :]:
        smaller = Bench(
            bench.architecture, bench.cluster, replace(bench.recipe, method=method, quantization=None)
        )
        found = _first_that_fits(smaller, [*rungs.whole().layouts, *_sharded(bench.cluster)])
        if found is not None and not found.report.is_tight:
            return found
        tight = tight or found
    return tight


def _sharded(cluster: Cluster) -> list[Layout]:
    """Full sharding, in its first framework."""
    layouts = rungs.sharded(cluster).layouts if cluster.num_gpus > 1 else ()
    return [layout for layout in layouts if layout.framework == layouts[0].framework]


def _first_that_fits(bench: Bench, layouts: list[Layout]) -> Tried | None:
    return next((best for layout in layouts if (best := bench.outcome(layout).best)), None)
