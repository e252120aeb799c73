"""The questions about size: Megatron-core, experts, and links between nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardscope.core.cluster import name_device
from shardscope.core.layout import Layout, list_divisors
from shardscope.core.number_format import format_count
from shardscope.planner.advice import descriptions, layout_ladder
from shardscope.planner.advice.memory_questions import LARGE_FROM
from shardscope.planner.advice.plan_evaluator import EvaluatedPlan, has_offload, is_faster
from shardscope.planner.advice.question_path import describe_figures
from shardscope.timing.collectives import crosses_nodes

if TYPE_CHECKING:
    from shardscope.planner.advice.question_path import QuestionPath
    from shardscope.timing.report import Part

SPLIT = "split_in_three"
"""Key of the rung with tensor, pipeline and expert parallelism."""
MANY_GPUS = 200
"""Number of GPUs that counts as "hundreds of GPUs"."""
MUCH = 0.25
"""Share of a step spent on sharded state from which a pipeline across nodes is evaluated."""
SLOWER = 1.5
"""Ratio of link speeds inside and between nodes from which tensor parallelism should not cross nodes."""


def ask_megatron(path: QuestionPath) -> None:
    """Try Megatron-core over 70B, with hundreds of GPUs or with experts: tensor parallel in a node, pipeline
    across.

    If size is the reason, the plan is taken unless it is clearly slower; otherwise it must be clearly faster.
    """
    arch, cluster = path.evaluator.architecture, path.evaluator.cluster
    is_large = arch.num_parameters > LARGE_FROM or cluster.num_gpus >= MANY_GPUS
    # 1. Is there a reason to try it? Size, or what the questions so far have shown.
    gpus = format_count(cluster.num_gpus, name_device(cluster))
    size = f"{descriptions.abbreviate_count(arch.num_parameters)} parameters, {gpus}"
    question = "Clearly over 70B, or hundreds of GPUs?"
    why = (
        "Megatron-core splits every layer over the GPUs of a node (tp) and the layers over nodes (pp): less "
        "to gather than with sharding, for a model rebuilt in its own modules."
    )
    reasons = _list_reasons_for_megatron(path)
    if not (is_large or reasons):
        path.record_turn("", question, "No: sharding is simpler.", size, why)
        return
    yes = "Yes" if is_large else f"No, but {reasons[0]}"
    # 2. Try it: tensor parallel inside a node, the fewest pipeline stages that fit.
    outcome = path.seen[SPLIT] = layout_ladder.try_megatron(path.evaluator)
    best = outcome.best
    if best is None:
        number = path.describe_needs(outcome) or size
        misfit = path.explain_misfit(outcome).removeprefix("No: ")
        path.record_turn(
            "", question, f"{yes}. Megatron-core does not fit here: {misfit}", number, why, outcome.nearest
        )
        return
    # 3. Compare. Published large runs use such layouts, so by size it wins ties; otherwise it must be clearly
    # faster.
    best = path.evaluator.with_room(best)
    answer = f"{yes}: {path.name_plan(best)}"
    if path.current is None:
        answer += ", and nothing simpler fits."
        wins = True
    else:
        by_rule = is_large or arch.num_moe_layers > 0 or has_offload(path.current.plan.layout)
        current = path.evaluator.with_room(path.current)
        wins = is_faster(best, current) or (by_rule and not is_faster(current, best))
        answer += f", {path.compare_plans(best, current)}"
        answer += "." if wins else ": not worth it."
    if wins:
        path.set_current(SPLIT, best)
    key = SPLIT if wins else ""
    path.record_turn(key, question, answer, f"{size}; {describe_figures(best)}", why, best)


def _list_reasons_for_megatron(path: QuestionPath) -> list[str]:
    """Return why Megatron-core is tried although size is no reason, the most general reason first."""
    waiting = _compute_waiting_share(path)
    waits = f"{100 * waiting:.0f} % of a step waits for state to cross nodes, or recomputes to wait less"
    reasons = (
        (path.evaluator.architecture.num_moe_layers > 0, "it has experts"),
        (Layout.megatron().framework in path.familiar, "the team runs Megatron-core"),
        (path.current is not None and has_offload(path.current.plan.layout), "offload is slow"),
        (path.rung == "split", "layers or sequences are split already"),
        (waiting > MUCH, waits),
        (path.current is None, "nothing fitted so far"),
    )
    return [reason for holds, reason in reasons if holds]


def _compute_waiting_share(path: QuestionPath) -> float:
    """Return the share of a step spent on all-gathers and gradient reduction, or on recomputation that makes
    them rarer. 0 on one node, without sharding (a larger batch helps more there), or if no time is known."""
    if path.current is None or path.rung == "whole" or path.evaluator.cluster.num_nodes == 1:
        return 0.0
    before, report = path.current.timed, path.evaluator.with_room(path.current).timed
    if before is None or report is None:
        return 0.0
    # Layers that are recomputed to allow a larger micro-batch are a cost of slow links too.
    again = max(0.0, report.parts["recomputation"] - before.parts["recomputation"])
    return (report.parts["gathers"] + report.parts["gradients"] + again) / report.seconds


def ask_experts(path: QuestionPath) -> None:
    """Ask whether expert parallelism is used, for models with experts."""
    moe = path.evaluator.architecture.mixture_of_experts
    if moe is None or not path.evaluator.architecture.num_moe_layers:
        return
    number = f"{moe.num_experts} experts in a layer, {moe.num_experts_per_tok} for each token"
    why = (
        "With expert parallelism (ep) a rank keeps some experts and tokens travel to them; with sharding "
        "every rank gathers all experts, of which each token uses few."
    )
    outcome, current = path.seen.get(SPLIT), path.current
    # Tokens travel twice in each layer with experts: the share of the step spent on that is the price to
    # name.
    ep = current.plan.degrees.ep if current else 1
    if current is not None and ep > 1:
        answer = f"Yes: ep {ep}, {moe.num_experts // ep} of them on each rank."
        if current.timed:
            number += f"; {_describe_waiting(current, 'expert_parallel')} for tokens"
    elif outcome is None or outcome.best is None:
        misfit = path.explain_misfit(outcome).removeprefix("No: ") if outcome else "none was tried."
        answer = f"Yes, but no plan tried with expert parallelism fits: {misfit}"
    else:
        answer = f"Yes, but {descriptions.name_plan(outcome.best.plan, path.evaluator.recipe)} is no faster."
    path.record_turn("", "Does it have experts?", answer, number, why, current, taken=ep > 1)


def ask_links(path: QuestionPath) -> None:
    """Ask about slow links: no tensor parallelism across nodes, and possibly a replica of the state in each
    node."""
    cluster, current = path.evaluator.cluster, path.current
    if cluster.num_nodes == 1:
        return
    # The ratio of the links decides whether anything that communicates in every layer may cross nodes.
    inside = cluster.intra_node_link.bandwidth_bytes_per_second / 1e9
    across = cluster.inter_node_link.bandwidth_bytes_per_second / 1e9
    question = "Are links between nodes slower than inside?"
    number = f"{inside:,.0f} GB/s a GPU inside, {across:,.0f} between"
    why = (
        "Tensor parallelism waits for a transfer in every layer, so it belongs inside a node; sharding and "
        "pipelines move less often, and can hide it."
    )
    if cluster.gpus_per_node == 1:
        device = name_device(cluster)
        answer = f"A node has one {device}: every degree crosses nodes."
        path.record_turn("", question, answer, f"{across:,.0f} GB/s a {device} between", why)
        return
    if inside < SLOWER * across:
        path.record_turn("", question, "No: degrees may cross nodes.", number, why)
        return
    degrees = current.plan.degrees if current else None
    answer = f"Yes, {inside / across:.0f} times: "
    # A search may have led to it where nothing else divides the batch.
    crosses = degrees is not None and crosses_nodes(degrees.tp, cluster.gpus_per_node)
    answer += (
        "tensor parallelism crosses nodes at that price" if crosses else "no tensor parallelism across nodes"
    )
    # More than one replica with more than one shard each: HSDP.
    copies = degrees is not None and degrees.replicate > 1 and degrees.shard > 1
    if copies:
        answer += "; each node shards a copy of its own, and only gradients cross (HSDP)"
    # Show the price with the user's own numbers: the same plan with tensor parallelism across nodes.
    wider = _try_wider_than_a_node(path)
    if wider is not None and current is not None:
        number += (
            f"; with tp {wider.plan.degrees.tp} {_describe_waiting(wider, 'tensor_parallel')} for it, "
            f"with tp {current.plan.degrees.tp} {_describe_waiting(current, 'tensor_parallel')}"
        )
    is_split = degrees is not None and degrees.tp > 1
    path.record_turn("", question, f"{answer}.", number, why, wider, taken=copies or is_split)


def _try_wider_than_a_node(path: QuestionPath) -> EvaluatedPlan | None:
    """Return the current plan with tensor parallelism across nodes; None if that cannot run."""
    current = path.current
    if current is None or current.plan.degrees.tp == 1 or current.timed is None:
        return None
    for tp in list_divisors(current.plan.world_size):
        if tp > path.evaluator.cluster.gpus_per_node:
            # The number of shards follows from the ranks that tp leaves.
            fields: dict[str, int | None] = {"tp": tp}
            if hasattr(current.plan.layout, "shard"):
                fields["shard"] = None
            trial = path.evaluator.evaluate_plan(replace(current.plan.layout, **fields), current.plan.recipe)
            return trial if isinstance(trial, EvaluatedPlan) and trial.timed else None
    return None


def _describe_waiting(evaluated: EvaluatedPlan, part: Part) -> str:
    assert evaluated.timed is not None
    return f"{100 * evaluated.timed.parts[part] / evaluated.timed.seconds:.0f} % of a step waits"
