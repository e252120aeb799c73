"""The layouts that advice tries, from the simplest on: a rung is one kind of sharding, in each framework that
supports it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from shardscope.core.layout import Layout, list_divisors
from shardscope.frameworks.registry import is_trained
from shardscope.planner.advice.plan_evaluator import (
    PAYS,
    WORTH_A_SETTING,
    EvaluatedPlan,
    Outcome,
    PlanEvaluator,
    find_fastest,
    is_clearly_better,
    is_faster,
    is_recipe_refused,
)

if TYPE_CHECKING:
    from shardscope.core.cluster import Cluster

MAX_STAGES, MAX_TENSOR_PARALLEL, MAX_EXPERT_PARALLEL = 32, 8, 64
"""Largest degrees that are evaluated; larger ones are left to the search."""
LONG_TOKENS = 8192
"""Sequence length from which context parallelism is evaluated as well."""


class Rung(NamedTuple):
    """One kind of sharding: layouts by framework, the default framework first."""

    layouts: tuple[Layout, ...]


def build_unsharded() -> Rung:
    """Return the rung without sharding: every rank holds all training state."""
    return Rung((Layout.ddp(),))


def build_sharded_optimizer(cluster: Cluster) -> Rung:
    """Return the rung with sharded gradients and optimizer; weights stay whole from forward to backward
    (ZeRO-2)."""
    # One group of shards over all GPUs first, then a replica in each node (HSDP), where only gradients cross
    # nodes.
    groups = [
        Layout.fsdp2(reshard_after_forward=False, replicate=copies) for copies in _list_replicas(cluster)
    ]
    return Rung((*groups, Layout.zero(stage=2)))


def build_fully_sharded(cluster: Cluster) -> Rung:
    """Return the rung with sharded weights too, all-gathered layer by layer (ZeRO-3)."""
    return Rung(
        (*(Layout.fsdp2(replicate=copies) for copies in _list_replicas(cluster)), Layout.zero(stage=3))
    )


def _list_replicas(cluster: Cluster) -> tuple[int, ...]:
    """Return the numbers of replicas to try: one over all GPUs, or one in each node (HSDP)."""
    return (1, cluster.num_nodes) if cluster.num_nodes > 1 and cluster.gpus_per_node > 1 else (1,)


def build_split_inside_a_node(cluster: Cluster) -> Rung:
    """Return FSDP2 with tensor or context parallelism inside a node, sharded over all nodes or in each."""
    degrees = [degree for degree in list_divisors(cluster.gpus_per_node) if 1 < degree <= MAX_TENSOR_PARALLEL]
    replicas = _list_replicas(cluster)
    return Rung((
        *(Layout.fsdp2(tp=degree, replicate=copies) for copies in replicas for degree in degrees),
        *(Layout.fsdp2(cp=degree, replicate=copies) for copies in replicas for degree in degrees),
    ))  # fmt: skip


def build_on_host() -> Rung:
    """Return the rung with training state in host memory: the optimizer's alone, then weights too."""
    return Rung((
        Layout.zero(stage=3, offload_optimizer="cpu"),
        Layout.zero(stage=3, offload_optimizer="cpu", offload_params="cpu"),
        Layout.fsdp2(offload="cpu"),
    ))  # fmt: skip


def build_on_drives() -> Rung:
    """Return the rung with the optimizer state on NVMe, then weights too."""
    return Rung((
        Layout.zero(stage=3, offload_optimizer="nvme", offload_params="cpu"),
        Layout.zero(stage=3, offload_optimizer="nvme", offload_params="nvme"),
    ))  # fmt: skip


def choose_outcome(evaluator: PlanEvaluator, rung: Rung, familiar: Collection[str]) -> Outcome:
    """Return the outcome of the default framework, or of a familiar one that fits as well and is about as
    fast."""
    # The first framework of a rung is the rule; others are exceptions that need a reason.
    by_framework: dict[str, list[Layout]] = {}
    for layout in rung.layouts:
        by_framework.setdefault(layout.framework, []).append(layout)
    outcomes: dict[str, Outcome] = {}
    rule = next(iter(by_framework))
    for name, layouts in by_framework.items():
        # Other frameworks are evaluated only where they could decide: some take longer to compute.
        best = outcomes[rule].best if outcomes else None
        if best is None or is_recipe_refused(best.plan) or name in familiar:
            outcomes[name] = _choose_first_or_faster(
                [evaluator.evaluate_layout(layout) for layout in layouts]
            )
            rule = _choose_rule(outcomes, rule)
    # A familiar framework replaces the rule unless the rule's plan is faster by more than the prediction
    # error.
    known = [name for name in outcomes if name in familiar]
    if rule not in known:
        for name in known:
            ours, familiar_best = outcomes[rule].best, outcomes[name].best
            if familiar_best and (ours is None or not is_faster(ours, familiar_best, PAYS)):
                return outcomes[name]
    return outcomes[rule]


def _choose_rule(outcomes: Mapping[str, Outcome], first: str) -> str:
    """Return the first framework whose plan fits; ``first`` if none fits. If its engine does not train that
    plan, the first one whose engine does and whose plan is about as good."""
    fitting = {name: outcome.best for name, outcome in outcomes.items() if outcome.best}
    rule = next(iter(fitting), first)
    if not fitting or not is_recipe_refused(fitting[rule].plan):
        return rule
    launched = (
        name
        for name, best in fitting.items()
        if is_trained(best.plan) and not is_clearly_better(fitting[rule], best)
    )
    return next(launched, rule)


def _choose_first_or_faster(outcomes: list[Outcome]) -> Outcome:
    """Return the first outcome that fits unless a later one is faster; if none fits, the nearest miss."""
    fitting = [outcome for outcome in outcomes if outcome.best]
    if not fitting:
        # The smallest shortage is the most useful answer to "why not".
        near = [outcome for outcome in outcomes if outcome.nearest]
        return min(near, key=_get_shortage, default=outcomes[0])
    first = _choose_worth_its_setting(fitting)
    launched = [outcome for outcome in fitting if outcome.best and is_trained(outcome.best.plan)]
    if not launched:
        return first
    other = _choose_worth_its_setting(launched)
    return first if first.best and other.best and is_clearly_better(first.best, other.best) else other


def _choose_worth_its_setting(outcomes: list[Outcome]) -> Outcome:
    # Layouts are ordered from simple to complex, so a later one must be worth its setting.
    first = outcomes[0]
    for outcome in outcomes[1:]:
        if outcome.best and first.best and is_faster(outcome.best, first.best, WORTH_A_SETTING):
            first = outcome
    return first


def _get_shortage(outcome: Outcome) -> float:
    return outcome.nearest.shortage if outcome.nearest else math.inf


# ------------------------------------------------------------------------------------------------ Megatron


def try_megatron(evaluator: PlanEvaluator) -> Outcome:
    """Try Megatron-core with tensor parallelism inside a node and as few pipeline stages as fit.

    Narayanan et al. 2021 (arXiv:2104.04473), takeaways 1 and 2: tensor parallel up to the GPUs of a node,
    pipeline across nodes; both as small as the model's memory allows, because the remaining factor is data
    parallel. Experts are distributed over data-parallel ranks without tensor parallelism (``etp=1``).
    """
    runs: list[EvaluatedPlan] = []
    misses: list[EvaluatedPlan] = []
    refusal = None
    # Keep the first refusal: later ones repeat it for other degrees.
    for split in _list_degrees_inside_a_node(evaluator):
        outcome = _try_fewest_stages(evaluator, split)
        runs += [outcome.best] if outcome.best else []
        misses += [outcome.nearest] if outcome.nearest else []
        refusal = refusal or outcome.refusal
    best = find_fastest(runs)
    launched = find_fastest(run for run in runs if is_trained(run.plan))
    if best is not None and launched is not None and not is_clearly_better(best, launched):
        best = launched
    if best is None:
        return Outcome(
            None, None, min(misses, key=lambda evaluated: evaluated.shortage, default=None), refusal
        )
    return Outcome(None, _try_interleaved(evaluator, best), None, None)


def _list_degrees_inside_a_node(evaluator: PlanEvaluator) -> Iterator[dict[str, int | None]]:
    """Yield tensor-parallel degrees inside a node, each with the expert- or context-parallel degrees to
    try."""
    experts, cluster = evaluator.architecture.mixture_of_experts, evaluator.cluster
    for tp in list_divisors(cluster.gpus_per_node):
        if tp > MAX_TENSOR_PARALLEL:
            return
        if experts is None or not evaluator.architecture.num_moe_layers:
            # Context parallelism exchanges keys and values in every layer, which only long sequences repay.
            for cp in (1, 2, 4, 8) if evaluator.recipe.seq_len >= LONG_TOKENS else (1,):
                yield {"tp": tp, "cp": cp}
            continue
        # At least the GPUs of a node: with fewer ranks, each holds so many experts that they seldom fit.
        least = min(cluster.gpus_per_node, experts.num_experts)
        for ep in list_divisors(experts.num_experts):
            if least <= ep <= min(cluster.num_gpus, MAX_EXPERT_PARALLEL):
                yield {"tp": tp, "ep": ep, "etp": 1 if ep > 1 and tp > 1 else None}


def _try_fewest_stages(evaluator: PlanEvaluator, split: Mapping[str, int | None]) -> Outcome:
    """Return the best of: the fewest stages that fit, the fewest that fit with the recipe unchanged and not
    tightly, and one stage per node, where only layer outputs cross nodes."""
    fitting: list[EvaluatedPlan] = []
    nearest: EvaluatedPlan | None = None
    refusal = None
    is_enough = False
    # Few stages first, since each adds to the bubble.
    for pp in list_divisors(evaluator.cluster.num_gpus // (split["tp"] or 1)):
        if pp > min(MAX_STAGES, evaluator.architecture.num_hidden_layers):
            break
        # Once a number of stages fits easily, more of them only matter where they keep state inside a node.
        if is_enough and pp != evaluator.cluster.num_nodes:
            continue
        outcome = evaluator.evaluate_layout(Layout.megatron(pp=pp, **split))  # type: ignore[arg-type]
        refusal = refusal or outcome.refusal
        if outcome.best:
            fitting.append(outcome.best)
            is_enough = is_enough or not (outcome.is_eased or outcome.best.report.is_tight)
        elif outcome.nearest and (nearest is None or outcome.nearest.shortage < nearest.shortage):
            nearest = outcome.nearest
    return Outcome(None, find_fastest(fitting), nearest, refusal)


def _try_interleaved(evaluator: PlanEvaluator, best: EvaluatedPlan) -> EvaluatedPlan:
    """Return the same plan with interleaved chunks if that is faster (Narayanan et al. 2021, 2.2)."""
    layers, pp = evaluator.architecture.num_hidden_layers, best.plan.degrees.pp
    if pp == 1:
        return best
    plans = [best]
    # All numbers of chunks: invalid ones are refused when the plan is made, and the best one is not
    # monotonic, since more chunks mean a shorter bubble and more transfers. Embedding and loss may count as
    # two layers: Llama 3 405B's 126 layers are 16 stages of 8 chunks (arXiv:2407.21783, section 3.3.2).
    for vpp in range(2, (layers + 2) // pp + 1):
        fields = {name: getattr(best.plan.layout, name) for name in ("tp", "pp", "cp", "ep", "etp")}
        run = evaluator.evaluate_fitting_plan(Layout.megatron(**fields, vpp=vpp), best.plan.recipe)
        if run is not None:
            plans.append(run)
    return find_fastest(plans) or best
