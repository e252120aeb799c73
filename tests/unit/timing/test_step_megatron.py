"""Tests of step time against megatron-core 0.16.1: its collectives, buffers and pipeline schedules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import shardscope as ss
from shardscope.prediction.pipeline import compute_bubbles
from shardscope.prediction.roofline import compute_roofline
from shardscope.prediction.schedule import compute_schedule
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


def sum_seconds(report: StepReport, part: str) -> float:
    return sum(one.seconds for one in report.communication if one.part == part)


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


def test_a_split_sequence_is_gathered_and_scattered() -> None:
    """Korthikanti et al. 2022, section 4.2.2: no all-reduce, with as many bytes in its two halves."""
    split, whole = (
        build_plan(ss.Layout.megatron(tp=8, sequence_parallel=is_split), LLAMA).step()
        for is_split in (True, False)
    )
    assert sum_bytes(split, "tensor_parallel", "all_reduce") == 0
    assert sum_bytes(whole, "tensor_parallel", "all_gather") == 0
    scattered = sum_bytes(split, "tensor_parallel", "reduce_scatter")
    assert scattered == sum_bytes(whole, "tensor_parallel", "all_reduce")


def test_other_frameworks_gather_no_heads() -> None:
    arch = replace(LLAMA, num_key_value_heads=8)
    plan = build_plan(ss.Layout.fsdp2(tp=8), arch)
    assert "heads" not in plan.step().explain("tensor_parallel")


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
    # Each MLP or shared expert, embedding, head and attention's output have the residual stream.
    scattered = tokens * 2 * (layers * inputs + (layers + 2) * hidden)
    scattered += tokens * 2 * (layers * hidden + (layers + 2) * hidden)
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


# ---- Gradient and parameter buffers


def test_gradient_buffers_are_zeroed_and_scaled_once_a_step() -> None:
    """With bf16 gradients half as many bytes are moved; one replica scales nothing."""
    small = ss.Architecture.of_size("1b")
    full, half = (
        build_plan(ss.Layout.megatron(grad_reduce_in_fp32=flag), small, batch=8).step().parts["gradients"]
        for flag in (True, False)
    )
    assert full > half
    alone = build_plan(ss.Layout.megatron(), small, cluster="1xh100-sxm-80gb", batch=1).step()
    twice = build_plan(ss.Layout.megatron(), small, cluster="1xh100-sxm-80gb", batch=2).step()
    # Accumulated twice as often, zeroed once: 2 reads and writes + 1 write, 4 + 1.
    assert twice.parts["gradients"] == pytest.approx(5 / 3 * alone.parts["gradients"])


def predict_gathers(vpp: int, overlap: bool) -> StepReport:
    layout = ss.Layout.megatron(tp=8, pp=4, vpp=vpp, overlap_grad_reduce=True, overlap_param_gather=overlap)
    return build_plan(layout, ss.models["llama-3.1-70b"], "16x8xh100-sxm-80gb", 64).step()


def test_overlapped_gathers_of_a_pipeline_wait_for_one_another() -> None:
    """Without interleaving, each stage's starts when the first micro-batch arrives (schedules.py)."""
    together, waiting = predict_gathers(1, False), predict_gathers(1, True)
    # All stages but the first, whose all-gather is in buckets, wait for all of it instead of one at a time.
    assert waiting.seconds > together.seconds + 2 * together.parts["gathers"]
    assert "overlap_param_gather" in waiting.explain("bubble")
    assert "overlap_param_gather" not in together.explain("bubble")
    interleaved = predict_gathers(5, True)
    assert interleaved.parts["gathers"] == pytest.approx(predict_gathers(5, False).parts["gathers"] / 5)
    assert interleaved.seconds < predict_gathers(5, False).seconds


@pytest.mark.parametrize("vpp", [1, 5])
def test_schedule_draws_the_first_micro_batchs_wait(vpp: int) -> None:
    layout = ss.Layout.megatron(tp=8, pp=4, vpp=vpp, overlap_grad_reduce=True, overlap_param_gather=True)
    plan = build_plan(layout, ss.models["llama-3.1-70b"], "16x8xh100-sxm-80gb", 64)
    schedule, report = compute_schedule(plan), plan.step()
    assert schedule.seconds == pytest.approx(report.seconds, rel=0.02)
    waits = [
        [block.seconds for block in schedule.get_stage(stage) if block.kind == "communication"]
        for stage in range(4)
    ]
    assert [len(each) for each in waits] == ([1] * 4 if vpp == 1 else [0] * 4)
    assert compute_bubbles(plan)["interleaved" if vpp > 1 else "1f1b"] == report.parts["bubble"]


def test_interleaved_reductions_overlap_with_other_chunks() -> None:
    """All but one chunk of 5 have the backward of others after them, several micro-batches of it."""
    layout = ss.Layout.megatron(tp=8, pp=4, vpp=5, overlap_grad_reduce=True)
    plan = build_plan(layout, ss.models["llama-3.1-70b"], "16x8xh100-sxm-80gb", 64, seq_len=4096)
    report = plan.step()
    hidden = report.hidden["gradients"] / sum_seconds(report, "gradients")
    assert hidden == pytest.approx(4 / 5, rel=0.01)


@pytest.mark.parametrize(("micro_batches", "exposed"), [(4, 1), (32, 22 / 160)])
def test_interleaved_sends_are_waited_for_while_the_pipeline_fills(
    micro_batches: int, exposed: float
) -> None:
    """schedules.py, num_warmup_microbatches: 2 (pp - 1) + (vpp - 1) pp of vpp x micro-batches chunks."""
    layout = ss.Layout.megatron(tp=8, pp=4, vpp=5)
    plan = build_plan(layout, ss.models["llama-3.1-70b"], "16x8xh100-sxm-80gb", 4 * micro_batches)
    report = plan.step()
    assert plan.num_micro_batches == micro_batches
    share = report.parts["pipeline_transfers"] / sum_seconds(report, "pipeline_transfers")
    assert share == pytest.approx(exposed)
