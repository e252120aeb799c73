"""The layouts that advice tries, from the simplest on: a rung is one way of spreading, in each framework
that has it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from shardscope.layout import Layout, divisors
from shardscope.planner.advising.bench import (
    PAYS,
    WORTH_A_SETTING,
    Bench,
    Outcome,
    Tried,
    fastest,
    is_faster,
)

if TYPE_CHECKING:
    from shardscope.architecture import Architecture
    from shardscope.cluster import Cluster

MAX_STAGES = 32
"""Pipeline stages that are tried; what needs more is left to the search."""


class Rung(NamedTuple):
    """One way of spreading: layouts by framework, the rule's own framework first."""

    layouts: tuple[Layout, ...]


def whole() -> Rung:
    """Every rank holds everything."""
    return Rung((Layout.ddp(),))


def gathered_once(cluster: Cluster) -> Rung:
    """Gradients and optimizer are split, weights stay whole from forward to backward (ZeRO-2)."""
    groups = [Layout.fsdp2(reshard_after_forward=False, replicate=copies) for copies in _copies(cluster)]
    return Rung((*groups, Layout.zero(stage=2)))


def sharded(cluster: Cluster) -> Rung:
    """Weights are split as well, and gathered layer by layer (ZeRO-3)."""
    return Rung((*(Layout.fsdp2(replicate=copies) for copies in _copies(cluster)), Layout.zero(stage=3)))


def _copies(cluster: Cluster) -> tuple[int, ...]:
    """One sharded state over all GPUs, or one in each node (HSDP)."""
    return (1, cluster.num_nodes) if cluster.num_nodes > 1 and cluster.gpus_per_node > 1 else (1,)


def split_inside_a_node(cluster: Cluster) -> Rung:
    """FSDP2 whose matrices, or sequences, are split over some GPUs of a node as well."""
    degrees = [degree for degree in divisors(cluster.gpus_per_node) if 1 < degree <= 8]
    return Rung((
        *(Layout.fsdp2(tp=degree) for degree in degrees),
        *(Layout.fsdp2(cp=degree) for degree in degrees),
    ))  # fmt: skip


def on_the_host() -> Rung:
    """Training state in host memory: the optimizer's alone, then weights too."""
    return Rung((
        Layout.zero(stage=3, offload_optimizer="cpu"),
        Layout.zero(stage=3, offload_optimizer="cpu", offload_params="cpu"),
        Layout.fsdp2(offload="cpu"),
    ))  # fmt: skip


def on_drives() -> Rung:
    """The optimizer's state on NVMe, then weights too."""
    return Rung((
        Layout.zero(stage=3, offload_optimizer="nvme", offload_params="cpu"),
        Layout.zero(stage=3, offload_optimizer="nvme", offload_params="nvme"),
    ))  # fmt: skip


def choose(bench: Bench, rung: Rung, familiar: Iterable[str]) -> Outcome:
    """The rule's own framework, or one that the team runs well if it fits as well and is about as fast."""
    by_framework: dict[str, list[Outcome]] = {}
    for layout in rung.layouts:
        by_framework.setdefault(layout.framework, []).append(bench.outcome(layout))
    found = {name: _first_or_faster(outcomes) for name, outcomes in by_framework.items()}
    rule = next((name for name, outcome in found.items() if outcome.best), next(iter(found)))
    known = [name for name in found if name in set(familiar)]
    if rule not in known:
        for name in known:
            ours, own = found[rule].best, found[name].best
            if own and (ours is None or not is_faster(ours, own, PAYS)):
                return found[name]
    return found[rule]


def _first_or_faster(outcomes: list[Outcome]) -> Outcome:
    """The first that fits unless a later one is faster; where none fits, what lacks least."""
    fitting = [outcome for outcome in outcomes if outcome.best]
    if not fitting:
        near = [outcome for outcome in outcomes if outcome.nearest]
        return min(near, key=_lacks, default=outcomes[0])
    first = fitting[0]
    for outcome in fitting[1:]:
        if outcome.best and first.best and is_faster(outcome.best, first.best, WORTH_A_SETTING):
            first = outcome
    return first


def _lacks(outcome: Outcome) -> int:
    return outcome.nearest.short_bytes if outcome.nearest else 2**62


# ------------------------------------------------------------------------------------------------ Megatron


def megatron(bench: Bench) -> Outcome:
    """Megatron-core with tensor parallelism inside a node and as few pipeline stages as fit.

    Narayanan et al. 2021 (arXiv:2104.04473), takeaways 1 and 2: tensor parallel up to the GPUs of a node,
    pipeline across nodes; together as small as the model's memory allows, for what remains is data parallel.
    Experts are shared out over data-parallel ranks, whole each (``etp=1``).
    """
    runs: list[Tried] = []
    misses: list[Tried] = []
    refusal = None
    for tp, ep in _inside(bench.architecture, bench.cluster):
        outcome = _fewest_stages(bench, tp, ep)
        runs += [outcome.best] if outcome.best else []
        misses += [outcome.nearest] if outcome.nearest else []
        refusal = refusal or outcome.refusal
    best = fastest(runs)
    if best is None:
        return Outcome(None, None, min(misses, key=lambda tried: tried.short_bytes, default=None), refusal)
    return Outcome(None, _interleaved(bench, best), None, None)


def _inside(architecture: Architecture, cluster: Cluster) -> Iterator[tuple[int, int]]:
    """Tensor-parallel degrees inside a node, with degrees over which the experts may be shared out."""
    experts = architecture.mixture_of_experts
    for tp in divisors(cluster.gpus_per_node):
        if tp > 8:
            return
        if experts is None or not architecture.num_moe_layers:
            yield tp, 1
            continue
        for ep in divisors(experts.num_experts):
            # From one node on: fewer ranks would hold so many experts that they seldom fit.
            if ep <= cluster.num_gpus and (ep >= min(cluster.gpus_per_node, experts.num_experts)):
                if ep > 64:
                    break
                yield tp, ep


def _fewest_stages(bench: Bench, tp: int, ep: int) -> Outcome:
    """The best of the fewest stages that fit, and of the fewest that fit without being eased."""
    found: list[Tried] = []
    nearest: Tried | None = None
    refusal = None
    for pp in divisors(bench.cluster.num_gpus // tp):
        if pp > min(MAX_STAGES, bench.architecture.num_hidden_layers):
            break
        outcome = bench.outcome(Layout.megatron(tp=tp, pp=pp, ep=ep, etp=1 if ep > 1 and tp > 1 else None))
        refusal = refusal or outcome.refusal
        if outcome.best:
            found.append(outcome.best)
            if not outcome.is_eased and not outcome.best.report.is_tight:
                break
        elif outcome.nearest and (nearest is None or outcome.nearest.short_bytes < nearest.short_bytes):
            nearest = outcome.nearest
    return Outcome(None, fastest(found), nearest, refusal)


def _interleaved(bench: Bench, best: Tried) -> Tried:
    """The same with several chunks on each stage where that is faster (Narayanan et al. 2021, 2.2)."""
    layers, pp = bench.architecture.num_hidden_layers, best.plan.degrees.pp
    if pp == 1:
        return best
    found = [best]
    for vpp in range(2, layers // pp + 1):
        fields = {name: getattr(best.plan.layout, name) for name in ("tp", "pp", "ep", "etp")}
        run = bench.tried(Layout.megatron(**fields, vpp=vpp), best.plan.recipe)
        if isinstance(run, Tried) and run.fits:
            found.append(run)
    return fastest(found) or best
