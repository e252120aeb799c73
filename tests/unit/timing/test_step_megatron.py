"""Tests of step time against megatron-core 0.16.1: its collectives, buffers and pipeline schedules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import shardscope as ss
from shardscope.prediction.roofline import compute_roofline
from shardscope.timing.report import StepReport

LLAMA = ss.models["llama-3.1-8b"]
NODE = "8xh100-sxm-80gb"


def build_plan(
    layout: ss.Layout, arch: ss.Architecture = LLAMA, cluster: str = NODE, batch: int = 16, **recipe: Any
) -> ss.Plan:
    return ss.Plan(arch, ss.Cluster.parse(cluster), ss.Recipe(global_batch_size=batch, **recipe), layout)


def sum_bytes(report: StepReport, part: str, collective: str) -> float:
    return sum(
        one.num_bytes for one in report.communication if (one.part, one.collective) == (part, collective)
    )


# ---- Tensor parallelism


@pytest.mark.parametrize(("recompute", "forwards"), [("none", 1), ("full", 2)])
def test_ranks_that_share_a_key_value_head_gather_all_heads(recompute: str, forwards: int) -> None:
    """attention.py, get_query_key_value_tensors: an all-gather forward and a reduce-scatter backward."""
    layout = ss.Layout.megatron(tp=8)
    few, enough = (
        build_plan(layout, replace(LLAMA, num_key_value_heads=heads), recompute=recompute).step()
        for heads in (4, 8)
    )
    tokens = 16 * few.num_tokens // 16
    heads = (32 + 2 * 4) * 128 * 2 * LLAMA.num_hidden_layers * tokens
    for collective, times in (("all_gather", forwards), ("reduce_scatter", 1)):
        added = sum_bytes(few, "tensor_parallel", collective)
        added -= sum_bytes(enough, "tensor_parallel", collective)
        assert added == pytest.approx(times * heads)
    assert few.parts["tensor_parallel"] > 1.3 * enough.parts["tensor_parallel"]
    assert "4 key/value heads" in few.explain("tensor_parallel")
    assert "heads" not in enough.explain("tensor_parallel")


def test_other_frameworks_gather_no_heads() -> None:
    arch = replace(LLAMA, num_key_value_heads=8)
    plan = build_plan(ss.Layout.fsdp2(tp=8), arch)
    assert sum_bytes(plan.step(), "tensor_parallel", "all_gather") == 0


def test_latent_attention_gathers_its_latents() -> None:
    """multi_latent_attention.py: down projections are replicated and work on the split sequence."""
    arch, tp = ss.models["deepseek-v2-lite"], 2
    report = build_plan(ss.Layout.megatron(tp=tp), arch, batch=8).step()
    latent = arch.latent_attention
    assert latent is not None and latent.q_lora_rank is None
    layers, hidden = arch.num_hidden_layers, arch.hidden_size
    # Without a down projection of the queries, the residual stream is all-gathered for them.
    inputs = hidden + latent.kv_lora_rank + latent.qk_rope_head_dim
    tokens = report.num_tokens / (report.num_gpus / tp)
    # Each MLP or shared expert, and embedding and head, have the residual stream.
    scattered = tokens * 2 * (layers * inputs + (layers + 2) * hidden)
    routed = sum(
        one.num_bytes
        for one in report.communication
        if one.collective == "reduce_scatter" and one.part == "tensor_parallel"
    )
    experts = arch.mixture_of_experts
    assert experts is not None
    # The routed experts' own reduce-scatters, forward and backward.
    dispatched = 2 * arch.num_moe_layers * tokens * experts.num_experts_per_tok * hidden * 2
    assert routed == pytest.approx(scattered + dispatched, rel=0.01)


@pytest.mark.parametrize("framework", ["megatron", "fsdp2"])
def test_replicated_matrices_multiply_the_split_sequence(framework: str) -> None:
    """The router, and the first projections of latent attention; DTensor multiplies them whole."""
    name = "deepseek-v3" if framework == "megatron" else "mixtral-8x7b"
    whole, split = (
        {
            operator.name: operator.flops
            for operator in compute_roofline(
                build_plan(getattr(ss.Layout, framework)(tp=tp), ss.models[name], batch=8)
            ).operators
        }
        for tp in (1, 8)
    )
    replicated = {"q_a_proj", "kv_a_proj_with_mqa", "gate"} & set(whole)
    assert len(replicated) == (3 if framework == "megatron" else 1)
    for operator in replicated:
        assert split[operator] == pytest.approx(whole[operator] / (8 if framework == "megatron" else 1))
    assert split["o_proj"] == pytest.approx(whole["o_proj"] / 8)


def test_selective_recomputation_repeats_all_of_core_attention() -> None:
    layout = ss.Layout.megatron(cp=8)
    plain, repeated = (
        build_plan(layout, batch=8, seq_len=32_768, recompute=how).step() for how in ("none", "selective")
    )
    sent, again = (sum_bytes(report, "context_parallel", "all_gather") for report in (plain, repeated))
    assert again == pytest.approx(4 / 3 * sent)
    eager = build_plan(ss.Layout.megatron(), recompute="selective", attention="eager", dropout=0.1).step()
    # Two plain matmuls of the six, softmax and dropout.
    assert eager.parts["recomputation"] > 1.2 * eager.parts["attention"] / 3
