"""Tests of FSDP2's collectives: their predicted bytes are those of the buffers that memory predicts."""

from __future__ import annotations

from typing import Any

import pytest

import shardscope as ss
from shardscope.frameworks.fsdp2.memory.groups import compute_groups
from shardscope.frameworks.fsdp2.memory.training_state import count_weights, find_shapes


def build_plan(model: str, cluster: str, layout: ss.Layout | None = None, **recipe: Any) -> ss.Plan:
    recipe = {"seq_len": 1024, "recompute": "full", "precision": "bf16"} | recipe
    return ss.Plan(
        ss.models[model], ss.Cluster.parse(cluster), ss.Recipe(**recipe), layout or ss.Layout.fsdp2()
    )


def sum_sent(plan: ss.Plan, collective: str) -> float:
    """Return the mean bytes of one round of a collective."""
    all_calls = [one for one in plan.step().communication if one.part in ("gathers", "gradients")]
    calls = [one for one in all_calls if one.collective == collective]
    return sum(one.num_bytes for one in calls) / len(calls) / plan.num_micro_batches


def quantize(model: str, cluster: str, **recipe: Any) -> ss.Plan:
    return build_plan(model, cluster, method="qlora", **recipe)


PLANS = {
    "dense": build_plan("llama-3.1-8b", "8xh100-sxm-80gb", precision="bf16-mixed"),
    "rows that are padded": build_plan("gpt2", "7xh100-sxm-80gb", global_batch_size=7),
    "tensor parallel": build_plan("llama-3.1-8b", "8xh100-sxm-80gb", ss.Layout.fsdp2(tp=2)),
    "adapters": build_plan("llama-3.1-8b", "8xh100-sxm-80gb", method="lora"),
    "QLoRA": quantize("llama-3.1-70b", "4xrtx-4090-24gb", global_batch_size=4),
    "QLoRA in fp32": quantize("llama-3.1-8b", "4xh100-sxm-80gb", precision="fp32"),
    "QLoRA of experts": quantize("mixtral-8x7b", "8xh100-sxm-80gb"),
    "more ranks than experts": build_plan("mixtral-8x7b", "4x8xh100-sxm-80gb"),
    "dense layers and experts": build_plan("deepseek-v2-lite", "2x8xh100-sxm-80gb"),
    "half of the experts": build_plan("mixtral-8x7b", "2x8xh100-sxm-80gb", ss.Layout.fsdp2(replicate=2)),
}


@pytest.mark.parametrize("name", PLANS)
def test_collectives_send_what_their_buffers_hold(name: str) -> None:
    plan = PLANS[name]
    (shape,) = find_shapes(plan).kinds
    stage = count_weights(plan, shape)
    groups = compute_groups(plan, stage)
    in_layers = groups.all_layers.parameters
    # The root group stays from forward to backward, and is all-gathered once.
    rounds = [one.num_bytes for one in plan.step().communication if one.part == "gathers"]
    assert [sent / plan.num_micro_batches for sent in rounds] == [groups.root + in_layers, in_layers]
    num_dense = stage.num_layers - stage.num_moe_layers
    reduced = num_dense * groups.dense.reduce_scatter_input
    reduced += stage.num_moe_layers * groups.experts.reduce_scatter_input
    assert sum_sent(plan, "reduce_scatter") == groups.root_reduce_scatter_input + reduced


@pytest.mark.parametrize("reshard", [True, False])
def test_a_pipeline_stage_gathers_its_root_once_a_step(reshard: bool) -> None:
    """It stays until the schedule has ended; and so do layers that are not resharded after forward."""
    layout = ss.Layout.fsdp2(pp=2, reshard_after_forward=reshard)
    plan = build_plan("llama-3.1-8b", "8xh100-sxm-80gb", layout, global_batch_size=16)
    worst = max(find_shapes(plan).kinds, key=lambda shape: count_weights(plan, shape).shard)
    stage = count_weights(plan, worst)
    groups = compute_groups(plan, stage)
    in_layers = groups.all_layers.parameters
    rounds = [one.num_bytes for one in plan.step().communication if one.part == "gathers"]
    # Of four micro-batches, two have their forward before the first backward.
    forwards = [2 * in_layers + groups.root, in_layers] if reshard else [in_layers + groups.root]
    assert rounds == forwards


def test_a_quantized_base_is_gathered_in_4_bits() -> None:
    adapters, quantized = (
        build_plan("llama-3.1-70b", "8xl40s-48gb", method=method) for method in ("lora", "qlora")
    )
    ratio = sum_sent(quantized, "all_gather") / sum_sent(adapters, "all_gather")
    # Embedding and head, a thirtieth of the weights, are not quantized.
    assert 0.25 < ratio < 0.3
    assert quantized.step().parts["gathers"] < 0.5 * adapters.step().parts["gathers"]


def test_experts_are_padded_to_as_many_as_there_are_ranks() -> None:
    few, many = (
        build_plan("mixtral-8x7b", "16x8xh100-sxm-80gb", layout, global_batch_size=128)
        for layout in (ss.Layout.fsdp2(replicate=16), ss.Layout.fsdp2())
    )
    for collective in ("all_gather", "reduce_scatter"):
        assert sum_sent(many, collective) == pytest.approx(16 * sum_sent(few, collective), rel=0.05)


def test_offloaded_experts_are_moved_as_the_fullest_rank_holds_them() -> None:
    """With one micro-batch: only HSDP adds up the gradients of several on the GPU."""
    cluster = ss.Cluster.parse("2x8xh100-sxm-80gb")
    few, many = (
        ss.Plan(
            ss.models["mixtral-8x7b"],
            cluster,
            ss.Recipe(seq_len=512, global_batch_size=16),
            ss.Layout.fsdp2(offload="cpu", replicate=replicate),
        )
        for replicate in (2, 1)
    )

    def sum_offload(plan: ss.Plan) -> float:
        report = plan.step()
        return report.parts["offload"] + report.hidden["offload"]

    # A rank has one of the eight experts of each layer, whether eight or sixteen share them.
    assert sum_offload(many) == pytest.approx(sum_offload(few), rel=0.1)
