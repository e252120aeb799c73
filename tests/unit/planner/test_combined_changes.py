"""Tests of several changes at once: the changed plan fits, with the smallest sufficient changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.requirements import thorough

import shardscope as ss
from shardscope.frameworks.registry import is_trained
from shardscope.planner.differences import Difference, find_differences
from shardscope.planner.memory_needs import fits
from shardscope.planner.repairs.combined_changes import (
    MOST_CHANGES,
    PlanChange,
    combine_changes,
    find_on_more_nodes,
    search_change,
)
from shardscope.planner.repairs.repairs import find_repairs


def make_plan(model: str, cluster: str, layout: ss.Layout, **recipe: Any) -> ss.Plan:
    return ss.Plan(ss.models[model], ss.Cluster.parse(cluster), ss.Recipe(**recipe), layout)


def has_room(plan: ss.Plan) -> bool:
    return fits(plan, plan.memory())


STEP_BY_STEP = [
    make_plan("llama-3.1-8b", "rtx-4090-24gb", ss.Layout.ddp()),
    make_plan(
        "llama-3.1-8b", "8xa100-sxm-80gb", ss.Layout.ddp(), micro_batch_size=16, global_batch_size=1024
    ),
    make_plan("llama-3.1-70b", "8xh100-sxm-80gb", ss.Layout.zero(stage=2), seq_len=32768, recompute="full"),
    make_plan("mixtral-8x7b", "8xa100-sxm-80gb", ss.Layout.zero(stage=2), global_batch_size=8),
]


@pytest.mark.parametrize(
    "plan", STEP_BY_STEP, ids=lambda plan: f"{plan.architecture.name} {plan.layout.title}"
)
def test_several_changes_fit_where_no_single_one_does(plan: ss.Plan) -> None:
    assert not any(has_room(repair.plan) for repair in find_repairs(plan))
    way = combine_changes(plan)
    assert way is not None and has_room(way.plan)
    assert 1 <= len(way.changes) <= MOST_CHANGES and way.text == ", ".join(way.changes)
    # On the same GPUs, and what is learnt stays the same.
    assert way.plan.cluster == plan.cluster and way.plan.recipe.method == plan.recipe.method
    assert way.plan.recipe.global_batch_size == plan.recipe.global_batch_size


def test_adapters_where_nothing_else_fits_can_be_launched_and_have_room() -> None:
    """QLoRA with Liger kernels was the answer: tight, and no engine here has them."""
    cluster = replace(ss.Cluster.parse("8xh100-sxm-80gb"), host_memory_bytes=1000 * 2**30)
    plan = ss.Plan(ss.models["llama-3.1-70b"], cluster, ss.Recipe(), ss.Layout.fsdp2())
    change = combine_changes(plan)
    assert change is not None and change.plan.recipe.has_adapters
    assert is_trained(plan) and is_trained(change.plan)
    assert has_room(change.plan) and not change.plan.memory().is_tight


@thorough()
def test_changes_are_all_differences_and_nothing_else() -> None:
    """Changes that a later step undid are not listed."""
    plan = make_plan("gemma-3-12b", "2xa100-sxm-40gb", ss.Layout.ddp(), seq_len=32768)
    way = combine_changes(plan)
    assert way is not None and way.plan.recipe.recompute == "full"
    assert "recompute none → full" in way.text and "activations" not in way.text
    (framework,) = [words for words in way.changes if " instead of DDP" in words]
    assert framework.startswith(way.plan.layout.description)
    assert len(way.changes) == len(find_differences(plan, way.plan))


def test_changes_from_and_to_no_value_read_as_sentences() -> None:
    assert str(Difference("offload", None, "cpu")) == "offload set to cpu"
    assert str(Difference("lora_rank", 16, None)) == "lora rank no longer set (it was 16)"
    assert str(Difference("recompute", "none", "full")) == "recompute none → full"


def test_a_search_keeps_the_options_of_the_same_framework() -> None:
    layout = ss.Layout.megatron(
        pp=8, use_precision_aware_optimizer=True, exp_avg_dtype="bf16", overlap_grad_reduce=True
    )
    cluster = "4x8xh100-sxm-80gb"
    plan = make_plan("llama-3.1-70b", cluster, layout, global_batch_size=8, recompute="full")
    way = search_change(plan)
    assert way is not None and has_room(way.plan)
    kept = {name: getattr(way.plan.layout, name) for name in ("exp_avg_dtype", "overlap_grad_reduce")}
    assert kept == {"exp_avg_dtype": "bf16", "overlap_grad_reduce": True}
    assert not any("dtype" in words or "overlap" in words for words in way.changes)
    assert f"tp 1 → {way.plan.degrees.tp}" in way.text


def test_the_framework_changes_if_only_a_search_finds_a_plan() -> None:
    plan = make_plan("llama-3.1-70b", "8xh100-sxm-80gb", ss.Layout.megatron(tp=8), precision="fp16-mixed")
    way = combine_changes(plan)
    assert way is not None and has_room(way.plan) and way.plan.cluster == plan.cluster
    assert way.plan == ss.search(plan.architecture, plan.cluster, plan.recipe).best
    assert way.plan.layout.title in way.text


@thorough()
def test_requested_headroom_stays_free() -> None:
    plan = make_plan("llama-3.1-8b", "8xh100-sxm-80gb", ss.Layout.fsdp2())
    free = 40 * 2**30
    way = search_change(plan, headroom_bytes=free)
    assert way is not None
    memory = way.plan.memory()
    assert memory.usable_bytes - memory.peak_bytes >= free
    assert search_change(plan, headroom_bytes=79 * 2**30) is None


@thorough()
def test_adapters_are_tried_before_more_nodes() -> None:
    plan = make_plan("llama-3.1-70b", "8xv100-sxm-32gb", ss.Layout.fsdp2(), precision="fp16-mixed")
    way = combine_changes(plan)
    assert way is not None and has_room(way.plan)
    assert way.plan.recipe.method != "full" and way.plan.cluster == plan.cluster


def test_the_fewest_nodes_are_added_if_nothing_else_fits() -> None:
    plan = make_plan("llama-3.1-405b", "8xh100-sxm-80gb", ss.Layout.fsdp2(), micro_batch_size=8)
    cpu = replace(plan.cluster, host_memory_bytes=2**38)
    plan = replace(plan, cluster=cpu)
    way = find_on_more_nodes([PlanChange((), plan)], has_room)
    assert way is not None and has_room(way.plan)
    nodes = way.plan.cluster.num_nodes
    assert nodes > 1 and way.changes[0] == f"{nodes} nodes of 8 GPUs"
    half = replace(way.plan.cluster, num_nodes=nodes // 2)
    layout = replace(way.plan.layout, shard=None)  # type: ignore[call-arg]
    assert not has_room(replace(way.plan, cluster=half, layout=layout))
    assert find_on_more_nodes([PlanChange((), plan)], lambda plan: False) is None
    ranks = make_plan("llama-3.1-70b", "2xcpu", ss.Layout.ddp(), precision="fp32")
    assert find_on_more_nodes([PlanChange((), ranks)], has_room) is None, "there is one machine"
    smaller = combine_changes(ranks)
    assert smaller is not None and has_room(smaller.plan) and smaller.plan.cluster == ranks.cluster
