"""Checks of shards: all-gathers repeated although there is room, across a slow network, or too small for the
link's latency; more ranks than experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardscope.core.finding import Finding
from shardscope.core.layout import list_divisors
from shardscope.core.number_format import format_count, format_gib
from shardscope.frameworks.registry import frameworks
from shardscope.memory.state.stages import StageShape
from shardscope.planner.checks.case import (
    NOTICEABLE,
    Case,
    Change,
    evaluate_variants,
    find_fastest,
    predict_memory,
    predict_step,
    replace_plan_fields,
)
from shardscope.planner.checks.number_format import format_bandwidth, format_percent
from shardscope.planner.memory_needs import fits
from shardscope.timing.collectives import crosses_nodes
from shardscope.timing.report import format_seconds

if TYPE_CHECKING:
    from shardscope.core.plan import Plan

FIELD = "reshard_after_forward"
HPZ = "zero_hpz_partition_size"
MUCH_FASTER = 0.1
"""Share of the step from which shards inside of a node are suggested: they take memory."""


def check_repeated_all_gathers(case: Case) -> Iterator[Finding]:
    """Report parameters that are freed after forward and all-gathered again, although they could be kept
    (ZeRO-2)."""
    layout = case.plan.layout
    # DeepSpeed has no such option: it frees parameters by reuse distance (stage3_max_reuse_distance).
    if not getattr(layout, FIELD, False) or case.step is None or not case.has_room:
        return
    fixed = find_fastest(evaluate_variants(case.plan, [({}, {FIELD: False})]))
    if fixed is None or fixed.memory.is_tight or case.compute_gain(fixed) < NOTICEABLE:
        return
    won = case.step.seconds - fixed.step.seconds
    yield Finding(
        name="gathers-again-though-room",
        severity="hint",
        why="Keeping all-gathered parameters from forward to backward would take "
        f"{format_gib(fixed.memory.peak_bytes)} of {format_gib(fixed.memory.usable_bytes)} GiB, and a step "
        f"{format_seconds(won)} less ({format_percent(case.compute_gain(fixed))}).",
        number=won,
        change="reshard_after_forward=False (what FSDP1 and ZeRO call SHARD_GRAD_OP and stage 2)",
        plan=fixed.plan,
    )


def check_shard_size(case: Case) -> Iterator[Finding]:
    """Report all-gathers of one layer so small on each rank that the link's latency exceeds the transfer
    time.

    A ring of n ranks passes n - 1 messages of one rank's shard, each with its latency (Thakur et al. 2005,
    section 4). If a layout supports replicas, fewer ranks share larger shards.
    """
    plan = case.plan
    shards = plan.degrees.shard * plan.degrees.cp
    # Only layouts with replicas can shard over fewer ranks without leaving GPUs idle.
    if "replicate" not in plan.layout.choices or shards < 2 or case.step is None:
        return
    cluster = plan.cluster
    # Sharding ranks of one tensor-parallel group are tp apart, so a group spans shards x tp consecutive
    # ranks.
    crosses = crosses_nodes(shards * plan.degrees.tp, cluster.gpus_per_node)
    link = cluster.inter_node_link if crosses else cluster.intra_node_link
    part = _compute_shard_bytes(plan)
    # The bytes that the link transfers during one latency: below that, a message costs more in latency than
    # in transfer.
    latency = link.latency_seconds * link.bandwidth_bytes_per_second
    if part >= latency:
        return
    # More replicas mean larger shards and fewer messages, but more memory, so the variants must fit.
    copies = list_divisors(plan.degrees.shard)[1:]
    candidates = evaluate_variants(
        plan, [({}, {"replicate": plan.degrees.replicate * more}) for more in copies]
    )
    fixed = case.find_best(variant for variant in candidates if case.compute_gain(variant) > NOTICEABLE)
    if fixed is None:
        return
    few, change = _describe_replicas(fixed.plan)
    yield Finding(
        name="sharded-too-finely",
        severity="warning",
        why=f"A layer's gather moves {part / 1e3:,.0f} kB from each of {shards} ranks; over {link.name} "
        f"({format_bandwidth(link.bandwidth_bytes_per_second)}) the latency of a message is worth "
        f"{latency / 1e3:,.0f} kB. {few} is {case.describe_speedup(fixed)}.",
        number=part,
        change=change,
        plan=fixed.plan,
    )


def check_shards_across_nodes(case: Case) -> Iterator[Finding]:
    """Report all-gathers that wait for the network, although shards inside of a node would fit.

    Zhao et al. 2023, section 3.2.2, call it hybrid sharding; ZeRO++ keeps a second partition of the weights
    inside of a node for backward (Wang et al. 2023, section 3.2).
    """
    plan, cluster = case.plan, case.plan.cluster
    shards = plan.degrees.shard * plan.degrees.cp
    crosses = shards > 1 and crosses_nodes(shards * plan.degrees.tp, cluster.gpus_per_node)
    if not crosses or case.step is None or not case.has_room:
        return
    variants = evaluate_variants(plan, _list_shards_inside_a_node(plan))
    fixed = find_fastest(
        one for one in variants if not one.memory.is_tight and case.compute_gain(one) >= MUCH_FASTER
    )
    if fixed is None:
        return
    share = case.get_share("gathers") + case.get_share("gradients")
    if "replicate" in plan.layout.choices:
        where = (
            "With shards inside of a node and replicas, whose gradients alone cross (HSDP)"
            if fixed.plan.degrees.shard * fixed.plan.degrees.cp > 1
            else "With replicas that are not sharded, whose gradients alone cross (as in DDP)"
        )
        _, change = _describe_replicas(fixed.plan)
    else:
        where = "With a copy of the weights on each node for backward"
        change = f"{HPZ}={getattr(fixed.plan.layout, HPZ)}"
    link = cluster.inter_node_link
    yield Finding(
        name="shards-cross-nodes",
        severity="warning",
        why=f"All-gathers and reductions over {shards} ranks cross nodes over {link.name} "
        f"({format_bandwidth(link.bandwidth_bytes_per_second)} per GPU): waiting for them takes "
        f"{format_percent(share)} of the step. {where}, it is {case.describe_speedup(fixed)}.",
        number=100 * share,
        change=change,
        plan=fixed.plan,
    )


def _describe_replicas(plan: Plan) -> tuple[str, str]:
    """Return the sharding of a plan with replicas, and the setting that leads to it."""
    replicate, shards = plan.degrees.replicate, plan.degrees.shard * plan.degrees.cp
    if shards == 1:
        copies = "each GPU" if plan.degrees.tp * plan.degrees.pp == 1 else "each model-parallel group"
        return "No sharding", f"replicate={replicate}: no sharding, {copies} has a whole copy"
    ranks = format_count(shards, "rank")
    return f"Sharding over {ranks}", f"replicate={replicate}: shard over {ranks}"


def _list_shards_inside_a_node(plan: Plan) -> Iterator[Change]:
    """Yield replicas whose shards are inside of a node, or ZeRO++'s second partition of a node's size."""
    per_node, tp = plan.cluster.gpus_per_node, plan.degrees.tp
    if "replicate" in plan.layout.choices:
        for factor in list_divisors(plan.degrees.shard)[1:]:
            ranks = plan.degrees.shard // factor * plan.degrees.cp
            if not crosses_nodes(ranks * tp, per_node):
                yield {}, {"replicate": plan.degrees.replicate * factor}
    elif getattr(plan.layout, HPZ, None) == 1 and per_node >= 2 * tp:
        yield {}, {HPZ: per_node // tp}


def has_ranks_without_experts(plan: Plan) -> bool:
    """Return whether experts are sharded over more ranks than there are experts."""
    experts = plan.architecture.mixture_of_experts
    if experts is None or "replicate" not in plan.layout.choices:
        return False
    return plan.degrees.shard * plan.degrees.cp > experts.num_experts


def check_expert_shards(case: Case) -> Iterator[Finding]:
    """Report experts that are sharded over more ranks than there are experts.

    ``fully_shard`` cuts each tensor along its first dimension, which of stacked experts has one row for each
    expert (torch 2.13, _fsdp_param.py; transformers 5, ``MixtralExperts``): ranks beyond hold no expert, and
    all-gathers are padded to one expert for each rank.
    """
    plan = case.plan
    experts = plan.architecture.mixture_of_experts
    if experts is None or not has_ranks_without_experts(plan):
        return
    shards = plan.degrees.shard * plan.degrees.cp
    divisors = list_divisors(plan.degrees.shard)
    factor = next((one for one in divisors if shards // one <= experts.num_experts), None)
    if factor is None or case.memory is None:
        return
    num_replicas = plan.degrees.replicate * factor
    changed = replace_plan_fields(plan, layout={"replicate": num_replicas})
    memory = None if changed is None else predict_memory(changed)
    if changed is None or memory is None:
        return
    saved = case.memory.peak_bytes - memory.peak_bytes
    step = predict_step(changed)
    won = case.step.seconds - step.seconds if case.step and step else 0.0
    saves_memory = saved >= NOTICEABLE * case.memory.peak_bytes
    changes_time = case.step is not None and abs(won) >= NOTICEABLE * case.step.seconds
    if not saves_memory and not (changes_time and won > 0 and fits(changed, memory)):
        return
    effects = [f"each GPU needs {format_gib(saved)} GiB less"] if saves_memory else []
    if changes_time:
        effects.append(f"a step takes {format_seconds(abs(won))} {'less' if won > 0 else 'more'}")
    yield Finding(
        name="more-ranks-than-experts",
        severity="warning",
        why=f"fully_shard gives each rank whole experts: {shards - experts.num_experts:,} of {shards:,} "
        f"ranks have none of the {experts.num_experts}, and each all-gather of them is padded to {shards:,} "
        "experts. "
        f"Sharded over {shards // factor:,} ranks, {' and '.join(effects)}.",
        number=saved / 2**30 if saves_memory else won,
        change=f"replicate={num_replicas}: shard over {shards // factor} ranks",
        plan=changed,
    )


def _compute_shard_bytes(plan: Plan) -> float:
    """Return the bytes that one rank sends in one layer's all-gather: its padded shards, as they travel."""
    # The traffic of a stage of this one layer: the step's own formula, which knows what is stored in 4 bits
    # and what is cast. The last layer, because in a mixture of experts the first layers may be dense.
    arch, framework = plan.architecture, frameworks[plan.layout.framework]
    last = arch.num_hidden_layers - 1
    shape = StageShape(1, is_first=False, is_last=False, num_layers=1, num_moe_layers=arch.is_moe_layer(last))
    stage = framework.memory_model().count_weights(plan, shape)
    transfers = framework.timing_model().state_traffic(plan, stage).transfers
    gather = next(one for one in transfers if one.collective == "all_gather")
    return gather.num_bytes / gather.ranks
