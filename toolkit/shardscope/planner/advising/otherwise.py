"""What else there is beside the plan that was advised, and what would do where nothing fits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardscope.planner.advising import rungs, words
from shardscope.planner.advising.bench import Bench, Tried, fastest
from shardscope.planner.advising.large import is_offloading

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from shardscope.layout import Layout
    from shardscope.plan import Plan
    from shardscope.planner.advising.path import Path

MAX_OTHERS = 6
MAX_NODES = 1024
GIVES = {
    "whole": "nothing to set up, and every rank holds everything",
    "gathered_once": "weights stay whole for a step, so less is gathered",
    "sharded": "least memory without offload, for a gather of every layer",
    "split": "layers or sequences split inside a node as well",
    "host": "state in host memory, for a slower step",
    "nvme": "state on drives, for the slowest step",
    "megatron": "layers split in a node, pipeline across, in Megatron-core's own modules",
    "experts": "whole experts on each rank, in Megatron-core's own modules",
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
    found += [(tried, "the same in a framework of its own") for tried in _same_elsewhere(path)]
    told = [
        (tried.plan, f"{words.named(tried.plan, path.bench.recipe)}: {gives}; {_beside(tried, advised)}.")
        for tried, gives in found[:MAX_OTHERS]
    ]
    if is_offloading(advised):
        told += list(instead(path.bench))
    return told


def _same_elsewhere(path: Path) -> Iterator[Tried]:
    """The rung of the plan in other frameworks."""
    rung = {"gathered_once": rungs.gathered_once, "sharded": rungs.sharded}.get(path.rung)
    if rung is None or path.current is None:
        return
    for layout in rung(path.bench.cluster).layouts:
        if layout.framework != path.current.plan.layout.framework:
            best = path.bench.outcome(layout).best
            if best:
                yield best


def _beside(tried: Tried, advised: Tried) -> str:
    return f"{words.needs(tried)}, {words.compared(tried, advised)}"


def misses(path: Path) -> list[tuple[Plan, str]]:
    """Of each way of spreading what lacks least, the nearest first."""
    near = [outcome.nearest for outcome in path.seen.values() if outcome.nearest]
    near.sort(key=lambda tried: tried.short_bytes)
    return [
        (
            tried.plan,
            f"Nearest miss: {words.named(tried.plan, path.bench.recipe)}: {words.lacks(tried)}.",
        )
        for tried in near[:3]
    ]


def instead(bench: Bench) -> Iterator[tuple[Plan, str]]:
    """What would do: more nodes, and adapters in place of all weights."""
    more = _more_nodes(bench)
    if more is not None:
        nodes = more.plan.cluster.num_nodes
        yield (
            more.plan,
            f"{nodes} nodes instead of {bench.cluster.num_nodes}: {words.named(more.plan, bench.recipe)} "
            f"fits without offload; {words.needs(more)}, {words.pace(more.timed)}.",
        )
    fewer = _adapters(bench)
    if fewer is not None:
        yield (
            fewer.plan,
            f"If adapters are enough: {words.named(fewer.plan, bench.recipe)}; {words.needs(fewer)}, "
            f"{words.pace(fewer.timed)}.",
        )


def _more_nodes(bench: Bench) -> Tried | None:
    """The fewest nodes, by doubling, on which full sharding fits; the batch grows where it must."""
    nodes = bench.cluster.num_nodes * 2
    if bench.cluster.gpu.vendor == "cpu":
        return None
    while nodes <= MAX_NODES:
        cluster = replace(bench.cluster, num_nodes=nodes)
        least = cluster.num_gpus * bench.recipe.micro_batch_size
        batch = -(-bench.recipe.global_batch_size // least) * least
        larger = Bench(bench.architecture, cluster, replace(bench.recipe, global_batch_size=batch))
        found = _first_that_fits(larger, rungs.sharded(cluster).layouts)
        if found is not None:
            return found
        nodes *= 2
    return None


def _adapters(bench: Bench) -> Tried | None:
    """LoRA, or else QLoRA, in the simplest layout that fits on these GPUs."""
    for method in ("lora", "qlora"):
        if bench.recipe.method == method or (bench.recipe.has_adapters and method == "lora"):
            continue
        recipe = replace(bench.recipe, method=method, quantization=None)
        smaller = Bench(bench.architecture, bench.cluster, recipe)
        layouts = [*rungs.whole().layouts]
        if bench.cluster.num_gpus > 1:
            layouts += rungs.sharded(bench.cluster).layouts
        found = _first_that_fits(smaller, layouts)
        if found is not None:
            return found
    return None


def _first_that_fits(bench: Bench, layouts: Iterable[Layout]) -> Tried | None:
    for layout in layouts:
        best = fastest([run for run in [bench.outcome(layout).best] if run])
        if best is not None:
            return best
    return None
