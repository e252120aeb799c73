"""Findings about plans: each appears with its number where it should, and stays away where it should not."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_plans import plans
from tests.requirements import examples, thorough

import shardscope as ss
from shardscope.catalog import links
from shardscope.core.number_format import format_gib
from shardscope.core.precision import widths
from shardscope.frameworks.registry import frameworks
from shardscope.planner.checks import CHECKS, SEVERITIES, Finding
from shardscope.planner.checks.nearby_widths import align_width
from shardscope.planner.checks.widths import list_widths_on_rank
from shardscope.planner.memory_needs import fits, list_memory_needs
from shardscope.timing.report import format_seconds


def make_plan(
    model: str = "llama-3.1-8b",
    cluster: str = "8xh100-sxm-80gb",
    layout: ss.Layout | None = None,
    **recipe: Any,
) -> ss.Plan:
    return ss.Plan(
        ss.models[model], ss.Cluster.parse(cluster), ss.Recipe(**recipe), layout or ss.Layout.fsdp2()
    )


def find_by_name(plan: ss.Plan, name: str, task: object = None) -> Finding | None:
    findings = [finding for finding in plan.findings(task) if finding.name == name]
    assert len(findings) <= 1, findings
    return findings[0] if findings else None


def find_only(plan: ss.Plan, name: str) -> Finding:
    findings = find_by_name(plan, name)
    assert findings is not None, [finding.name for finding in plan.findings()]
    return findings


@settings(max_examples=examples(40), deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(plan=plans())
def test_every_plan_can_be_checked(plan: ss.Plan) -> None:
    """Never an exception, never a name twice, the worst first; a fixed plan no longer has its finding."""
    findings = plan.findings()
    names = [finding.name for finding in findings]
    assert len(set(names)) == len(names)
    order = [SEVERITIES.index(finding.severity) for finding in findings]
    assert order == sorted(order)
    for finding in findings:
        assert finding.why.endswith(".") and finding.change and finding.name == finding.name.lower()
        if finding.plan is None:
            continue
        assert finding.plan != plan
        after = {one.name: one for one in finding.plan.findings()}.get(finding.name)
        if after is not None and finding.name not in ("width-misses-matrix-units",):
            assert finding.number is not None and after.number is not None
            assert after.number < finding.number, (finding, after)


def test_findings_have_distinct_names() -> None:
    assert len(set(CHECKS)) == len(CHECKS)


def test_findings_print_as_sentences() -> None:
    """Without the fixed plans, which fill a screen each."""
    findings = make_plan(micro_batch_size=2).findings()
    lines = str(findings).splitlines()
    assert len(lines) == len(findings) > 0
    for line, finding in zip(lines, findings, strict=True):
        assert line == str(finding) and finding.why in line and finding.change in line and "Plan(" not in line


# ------------------------------------------------------------------------------------ recomputation


def test_missing_recomputation_is_reported_if_memory_is_short() -> None:
    plan = make_plan(micro_batch_size=2)
    finding = find_only(plan, "recomputation-off")
    assert finding.severity == "danger" and finding.plan is not None
    won = plan.memory().peak_bytes - finding.plan.memory().peak_bytes
    assert finding.number == won / 2**30
    assert finding.plan.memory().fits and finding.plan.recipe.recompute in ("selective", "full")
    assert find_by_name(plan, "out-of-gpu-memory") is None, "said once"
    assert find_by_name(make_plan(micro_batch_size=1), "recomputation-off") is None


def test_offloaded_activations_that_would_fit_are_reported_as_such() -> None:
    plan = make_plan(recompute="offload")
    finding = find_only(plan, "activations-offloaded-though-room")
    assert finding.plan is not None
    assert finding.plan.recipe.recompute == "none"
    assert finding.why.startswith("With activations kept on the GPU, the peak is ")
    assert finding.change == "Activations kept on the GPU"
    assert find_by_name(plan, "recomputation-on") is None


def test_unnecessary_recomputation_is_reported() -> None:
    plan = make_plan(recompute="full")
    finding = find_only(plan, "recomputation-on")
    assert finding.plan is not None
    assert finding.number == plan.step().seconds - finding.plan.step().seconds > 0
    assert finding.plan.memory().fits and not finding.plan.memory().is_tight
    assert (
        find_by_name(make_plan(micro_batch_size=8, seq_len=4096, recompute="full"), "recomputation-on")
        is None
    )


# ------------------------------------------------------------------------------------------ positions


def test_a_sequence_beyond_rotary_positions_is_reported() -> None:
    name = "longer-than-the-models-positions"
    plan = make_plan("llama-2-7b", seq_len=8192)
    finding = find_only(plan, name)
    assert finding.severity == "warning" and finding.change == "seq_len=4096" and finding.number == 8192
    assert "seq_len=8,192" in finding.why and "at most 4,096 tokens" in finding.why
    assert finding.plan is not None and finding.plan.recipe.seq_len == 4096
    assert find_by_name(finding.plan, name) is None
    assert find_by_name(make_plan("llama-3.1-8b", seq_len=131072), name) is None


# ------------------------------------------------------------------------------------------ pipeline


def test_fewer_micro_batches_than_stages_are_reported() -> None:
    layout = ss.Layout.megatron(tp=8, pp=8)
    plan = make_plan("llama-3.1-70b", "8x8xh100-sxm-80gb", layout, global_batch_size=4)
    finding = find_only(plan, "fewer-micro-batches-than-stages")
    step = plan.step()
    assert finding.number == pytest.approx(100 * step.parts["bubble"] / step.seconds)
    # 7 idle slots beside 4 busy ones.
    assert finding.number == pytest.approx(100 * 7 / 11, rel=0.1)
    assert finding.plan is not None and finding.plan.num_micro_batches >= 8
    enough = replace(plan, recipe=replace(plan.recipe, global_batch_size=8))
    assert find_by_name(enough, "fewer-micro-batches-than-stages") is None


def test_interleaved_stages_with_one_micro_batch_wait_for_all_others() -> None:
    plan = make_plan(
        "llama-3.1-8b", "4xh100-sxm-80gb", ss.Layout.fsdp2(pp=4, vpp=4), global_batch_size=1, recompute="full"
    )
    finding = find_only(plan, "fewer-micro-batches-than-stages")
    # Three of four stages wait at any time, except during the update.
    assert finding.severity == "danger" and 60 < finding.number < 75


def test_a_smaller_micro_batch_comes_before_a_larger_batch() -> None:
    layout = ss.Layout.megatron(tp=8, pp=8)
    plan = make_plan(
        "llama-3.1-70b", "8x8xh100-sxm-80gb", layout, global_batch_size=16, micro_batch_size=4, seq_len=2048
    )
    finding = find_only(plan, "fewer-micro-batches-than-stages")
    assert finding.plan is not None
    assert finding.plan.recipe.global_batch_size == 16 and finding.plan.num_micro_batches >= 8


# ------------------------------------------------------------------------------------------- overlap


@pytest.mark.parametrize(
    ("layout", "change"),
    [
        (ss.Layout.megatron(tp=8, pp=16, vpp=8), "overlap_grad_reduce=True, overlap_param_gather=True"),
        (ss.Layout.megatron(tp=8, pp=16, distributed_optimizer=False), "overlap_grad_reduce=True"),
        (ss.Layout.megatron(tp=8, pp=16, vpp=8, overlap_grad_reduce=True), "overlap_param_gather=True"),
        # Without interleaving, each stage would all-gather when the first micro-batch arrives.
        (ss.Layout.megatron(tp=8, pp=16), "overlap_grad_reduce=True"),
    ],
)
def test_collectives_that_could_overlap_with_computation(layout: ss.Layout, change: str) -> None:
    recipe: dict[str, Any] = {"seq_len": 8192, "global_batch_size": 2048, "recompute": "full"}
    plan = make_plan("llama-3.1-405b", "2048x8xh100-sxm-80gb", layout, **recipe)
    finding = find_only(plan, "collectives-not-overlapped")
    assert finding.change == change and finding.plan is not None
    slow, fast = plan.step(), finding.plan.step()
    assert finding.number == pytest.approx(100 * (1 - fast.seconds / slow.seconds)) and finding.number > 0.5
    hidden = fast.hidden["gradients"] + fast.hidden["gathers"]
    assert hidden > slow.hidden["gradients"] + slow.hidden["gathers"]
    assert find_by_name(finding.plan, "collectives-not-overlapped") is None


def test_deepspeed_overlaps_by_itself_in_stage_3_only() -> None:
    recipe: dict[str, Any] = {"seq_len": 1024, "global_batch_size": 32, "micro_batch_size": 2}
    staged = {
        stage: make_plan("llama-3.2-1b", "2x8xa100-sxm-80gb", ss.Layout.zero(stage), **recipe)
        for stage in (1, 2, 3)
    }
    for stage in (1, 2):
        assert find_only(staged[stage], "collectives-not-overlapped").change == "overlap_comm=True"
    assert find_by_name(staged[3], "collectives-not-overlapped") is None
    ranks = make_plan("gpt2", "2xcpu", ss.Layout.megatron(), precision="fp32", seq_len=512)
    assert find_by_name(ranks, "collectives-not-overlapped") is None, "nothing covers what a CPU rank sends"


# ----------------------------------------------------------------------------------- tensor parallel


def test_tensor_parallel_across_nodes() -> None:
    plan = make_plan(
        "llama-3.1-70b",
        "8x8xh100-sxm-80gb",
        ss.Layout.megatron(tp=16, pp=1),
        global_batch_size=64,
        recompute="full",
    )
    finding = find_only(plan, "tensor-parallel-over-slow-link")
    step = plan.step()
    assert finding.number == pytest.approx(100 * step.parts["tensor_parallel"] / step.seconds)
    assert "infiniband-ndr" in finding.why
    assert finding.plan is not None and finding.plan.degrees.tp <= 8
    assert finding.plan.step().tokens_per_second > step.tokens_per_second


def test_tensor_parallel_over_pcie() -> None:
    plan = make_plan("llama-3.1-8b", "8xl40s-48gb", ss.Layout.megatron(tp=8), global_batch_size=64)
    finding = find_only(plan, "tensor-parallel-over-slow-link")
    assert finding.number is not None and finding.number > 20
    assert plan.cluster.intra_node_link.name in finding.why


def test_tensor_parallel_groups_that_the_end_of_a_node_divides_are_reported() -> None:
    """Four ranks of six GPUs a node: the second four are on two nodes."""
    plan = make_plan("llama-3.1-8b", "2x6xh100-sxm-80gb", ss.Layout.megatron(tp=4), global_batch_size=12)
    finding = find_only(plan, "tensor-parallel-over-slow-link")
    assert "4 tensor-parallel ranks exchange activations across nodes over infiniband-ndr" in finding.why
    assert finding.plan is not None and 6 % finding.plan.degrees.tp == 0


@pytest.mark.parametrize(
    ("nodes", "layout", "batch", "degrees"),
    [
        ("4x6", ss.Layout.megatron(tp=4), 24, "tp=2"),
        # With tp=2 alone, six replicas would share three sequences.
        ("2x6", ss.Layout.megatron(tp=4), 3, "tp=2 with pp=2"),
    ],
)
def test_a_tp_inside_a_node_is_named_if_the_plan_takes_it(
    nodes: str, layout: ss.Layout, batch: int, degrees: str
) -> None:
    """Nodes of six GPUs were advised tp=3, which a model with 64 heads cannot have."""
    plan = make_plan("llama-3.1-70b", f"{nodes}xh100-sxm-80gb", layout, global_batch_size=batch, seq_len=4096)
    finding = find_only(plan, "tensor-parallel-over-slow-link")
    assert finding.plan is None
    assert finding.change == f"At most {degrees}, which keeps each group on a node of 6 GPUs"
    named = {name: int(number) for name, number in re.findall(r"(tp|pp)=(\d)", degrees)}
    replace(plan, layout=replace(plan.layout, **named))


def test_no_tp_is_named_if_the_plan_takes_none_inside_a_node() -> None:
    plan = make_plan(
        "llama-3.1-70b", "4x6xh100-sxm-80gb", ss.Layout.fsdp2(tp=4), global_batch_size=6, seq_len=4096
    )
    finding = find_only(plan, "tensor-parallel-over-slow-link")
    assert finding.plan is None and finding.change == (
        "A tp that keeps each group on a node of 6 GPUs; it needs other degrees or another batch size"
    )


def test_tensor_parallel_inside_a_node_with_nvlink() -> None:
    plan = make_plan(
        "llama-3.1-70b", "8x8xh100-sxm-80gb", ss.Layout.megatron(tp=4, pp=4), global_batch_size=256
    )
    assert find_by_name(plan, "tensor-parallel-over-slow-link") is None


# ------------------------------------------------------------------------------------------ sharding


def test_resharding_after_forward_with_enough_memory_is_reported() -> None:
    plan = make_plan("llama-3.2-1b", "2x8xl40s-48gb", seq_len=1024, global_batch_size=64)
    finding = find_only(plan, "gathers-again-though-room")
    assert finding.plan is not None
    assert finding.number == plan.step().seconds - finding.plan.step().seconds > 0
    assert finding.plan.layout.reshard_after_forward is False  # type: ignore[attr-defined]
    assert find_by_name(finding.plan, "gathers-again-though-room") is None


@pytest.mark.parametrize(
    ("cluster", "seq_len", "is_tight", "gains"),
    [("8xl40s-48gb", 1024, True, True), ("8xh100-sxm-80gb", 8192, False, False)],
    ids=["too little memory", "too little time"],
)
def test_resharding_is_not_reported_where_keeping_the_parameters_does_not_pay(
    cluster: str, seq_len: int, is_tight: bool, gains: bool
) -> None:
    kept = ss.Layout.fsdp2(reshard_after_forward=False)
    recipe = {"seq_len": seq_len, "recompute": "full", "micro_batch_size": 1}
    plan, other = (
        make_plan("llama-3.1-8b", cluster, layout, **recipe) for layout in (ss.Layout.fsdp2(), kept)
    )
    assert plan.memory().fits and not plan.memory().is_tight and other.memory().fits
    assert other.memory().is_tight == is_tight
    assert (other.step().seconds < 0.98 * plan.step().seconds) == gains
    assert find_by_name(plan, "gathers-again-though-room") is None


def test_too_many_shards_are_reported() -> None:
    plan = make_plan("llama-3.2-1b", "64x8xh100-sxm-80gb", seq_len=1024, global_batch_size=512)
    finding = find_only(plan, "sharded-too-finely")
    arch = plan.architecture
    layer = sum(arch.layer_parameters(0).values())
    assert finding.number == layer * widths["bf16-mixed"].compute / 512
    assert finding.plan is not None and finding.plan.degrees.shard < 512
    assert finding.plan.step().tokens_per_second > plan.step().tokens_per_second
    assert find_by_name(make_plan("llama-3.1-8b"), "sharded-too-finely") is None


@pytest.mark.parametrize(
    ("layout", "change"),
    [
        (ss.Layout.fsdp2(), "replicate=4: shard over 8 ranks"),
        (ss.Layout.zero(3), "zero_hpz_partition_size=8"),
    ],
)
def test_shards_across_a_slow_network_are_reported(layout: ss.Layout, change: str) -> None:
    """Four nodes on 25 Gb/s Ethernet waited for it 85 % of the step, and no finding said so."""
    fast = make_plan("llama-3.1-8b", "4x8xh100-sxm-80gb", layout, seq_len=4096, global_batch_size=64)
    assert find_by_name(fast, "shards-cross-nodes") is None
    plan = replace(fast, cluster=replace(fast.cluster, inter_node_link=links["ethernet-25g"]))
    finding, step = find_only(plan, "shards-cross-nodes"), plan.step()
    waits = step.parts["gathers"] + step.parts["gradients"]
    assert finding.number == pytest.approx(100 * waits / step.seconds) and finding.change == change
    assert "over 32 ranks cross nodes over ethernet-25g (3.1 GB/s per GPU)" in finding.why
    assert finding.plan is not None and finding.plan.memory().fits
    assert finding.plan.step().tokens_per_second > 1.5 * step.tokens_per_second
    assert find_by_name(finding.plan, "shards-cross-nodes") is None


def test_replicas_that_are_not_sharded_are_called_so() -> None:
    """LoRA has room for the whole model: "replicate=32: shard over 1 rank" was called shards inside of a
    node."""
    recipe = {"seq_len": 2048, "global_batch_size": 64, "method": "lora", "precision": "bf16"}
    plan = make_plan("llama-3.1-8b", "4x8xh100-sxm-80gb", **recipe)
    plan = replace(plan, cluster=replace(plan.cluster, inter_node_link=links["ethernet-25g"]))
    finding = find_only(plan, "shards-cross-nodes")
    assert finding.change == "replicate=32: no sharding, each GPU has a whole copy"
    assert "With replicas that are not sharded, whose gradients alone cross (as in DDP)" in finding.why
    recipe |= {"seq_len": 1024, "global_batch_size": 512}
    plan = make_plan("llama-3.2-1b", "64x8xh100-sxm-80gb", **recipe)
    finding = find_only(plan, "sharded-too-finely")
    assert finding.change == "replicate=512: no sharding, each GPU has a whole copy"
    assert "No sharding is " in finding.why


def test_shards_inside_of_odd_nodes_are_suggested_only_if_all_are() -> None:
    """Shards of three ranks are on two of the nodes of five GPUs."""
    plan = make_plan("llama-3.2-1b", "3x5xh100-sxm-80gb", seq_len=1024, global_batch_size=60)
    plan = replace(plan, cluster=replace(plan.cluster, inter_node_link=links["ethernet-25g"]))
    finding = find_only(plan, "shards-cross-nodes")
    assert finding.plan is not None and finding.plan.degrees.shard == 5


def test_shards_of_4_bit_weights_are_counted_as_they_are_stored() -> None:
    """QLoRA all-gathers Linears in half a byte a weight, and the adapters in two."""
    numbers = {}
    for method in ("full", "lora", "qlora"):
        plan = make_plan(
            "llama-3.2-1b",
            "64x8xh100-sxm-80gb",
            seq_len=1024,
            global_batch_size=512,
            method=method,
            precision="bf16",
        )
        numbers[method] = find_only(plan, "sharded-too-finely").number
    adapters = numbers["lora"] - numbers["full"]
    assert adapters > 0
    assert numbers["qlora"] - adapters == pytest.approx(numbers["full"] / 4, rel=0.01)


def test_more_ranks_than_experts_are_replicated() -> None:
    """Eight experts over 64 ranks: 56 have none, and all-gathers are padded to 64 experts."""
    crowded = make_plan("mixtral-8x7b", "64xh100-sxm-80gb", global_batch_size=64)
    finding = find_by_name(crowded, "more-ranks-than-experts")
    assert finding is not None and finding.plan is not None and finding.change.startswith("replicate=8")
    saved = crowded.memory().peak_bytes - finding.plan.memory().peak_bytes
    assert saved / 2**30 == finding.number
    assert saved > 0.2 * crowded.memory().peak_bytes
    won = crowded.step().seconds - finding.plan.step().seconds
    assert won > 0.3 * crowded.step().seconds, "all-gathers and reduce-scatters are an eighth"
    assert f"a step takes {format_seconds(won)} less" in finding.why
    for method in ("full", "lora"):
        of_method = replace(crowded, recipe=replace(crowded.recipe, method=method))
        assert "on the fullest of 64 ranks" in of_method.memory().explain("parameters")
    few = make_plan("mixtral-8x7b", "8xh100-sxm-80gb", global_batch_size=64)
    assert find_by_name(few, "more-ranks-than-experts") is None


# ----------------------------------------------------------------------------------------- precision


def test_fp16_on_a_gpu_with_bf16_is_reported() -> None:
    finding = find_only(make_plan(precision="fp16-mixed"), "fp16-though-bf16-is-there")
    assert finding.number == 65_504
    assert finding.plan is not None and finding.plan.recipe.precision == "bf16-mixed"
    on_volta = make_plan("gpt2", "8xv100-sxm-32gb", precision="fp16-mixed", seq_len=1024)
    assert find_by_name(on_volta, "fp16-though-bf16-is-there") is None
    assert find_by_name(make_plan(), "fp16-though-bf16-is-there") is None


@pytest.mark.parametrize("card", ["v100-sxm-32gb", "t4-16gb"])
def test_bf16_on_a_gpu_without_it_is_reported(card: str) -> None:
    plan = make_plan("gpt2", f"8x{card}", ss.Layout.ddp(), seq_len=1024)
    finding = find_only(plan, "bf16-is-not-there")
    assert finding.severity == "warning" and finding.plan is not None
    assert finding.plan.recipe == replace(plan.recipe, precision="fp16-mixed")
    assert finding.number == plan.cluster.gpu.peak_flops["fp16"] / 1e12
    for there in (finding.plan, make_plan("gpt2", "8xa100-sxm-80gb", seq_len=1024)):
        assert find_by_name(there, "bf16-is-not-there") is None


def test_a_quantized_base_that_leaves_its_experts_is_reported() -> None:
    """The weights in 4 bits are the part of the parameters that shrinks from LoRA to QLoRA."""
    plan = make_plan("qwen3-30b-a3b", "1xh200-sxm-141gb", ss.Layout.ddp(), seq_len=1024, method="qlora")
    finding = find_only(plan, "experts-are-not-quantized")
    assert finding.plan is not None and finding.plan.recipe.method == "lora"
    saved = finding.plan.memory().components["parameters"] - plan.memory().components["parameters"]
    # From 2 bytes to about half a byte.
    share = 100 * saved / 1.5 / plan.architecture.num_parameters
    assert finding.number == pytest.approx(share, rel=0.05)
    dense = make_plan("llama-3.1-8b", "1xh200-sxm-141gb", ss.Layout.ddp(), seq_len=1024, method="qlora")
    assert find_by_name(dense, "experts-are-not-quantized") is None


def test_reductions_in_half_precision() -> None:
    name = "reductions-in-half-precision"
    plan = make_plan(layout=ss.Layout.zero(stage=2))
    finding = find_only(plan, name)
    # Seven additions of 8 significant bits each.
    assert finding.number == pytest.approx(100 * 7**0.5 / 256)
    assert finding.severity == "hint" and finding.change.startswith("communication_data_type='fp32'")
    assert finding.plan is not None and find_by_name(finding.plan, name) is None
    parted = make_plan("mixtral-8x7b", layout=ss.Layout.zero(stage=2, ep=8))
    in_words = find_only(parted, name)
    assert "in the DeepSpeed configuration" in in_words.change and "sums in fp32" in in_words.change
    assert in_words.plan is not None and find_by_name(in_words.plan, name) is None
    many = make_plan(cluster="32x8xh100-sxm-80gb", layout=ss.Layout.zero(stage=2), global_batch_size=256)
    assert find_only(many, name).severity == "warning"
    assert find_by_name(make_plan(), name) is None, "FSDP2's engine reduces in fp32"
    megatron = make_plan(layout=ss.Layout.megatron(grad_reduce_in_fp32=False))
    fixed = find_only(megatron, name).plan
    assert fixed is not None and find_by_name(fixed, name) is None
    assert find_by_name(make_plan(layout=ss.Layout.megatron()), name) is None
    assert find_by_name(make_plan(cluster="h100-sxm-80gb", layout=ss.Layout.zero(stage=0)), name) is None


@pytest.mark.parametrize(
    ("name", "cluster", "layout", "recipe"),
    [
        ("reductions-in-half-precision", "2x8xh100-sxm-80gb", ss.Layout.zero(stage=2), {"recompute": "full"}),
        ("updates-round-away", "8x8xh100-sxm-80gb", ss.Layout.fsdp2(), {"precision": "bf16"}),
        ("gpu-nearly-full", "8xa100-sxm-40gb", ss.Layout.fsdp2(), {}),
    ],
)
def test_a_fix_that_costs_time_says_how_much(
    name: str, cluster: str, layout: ss.Layout, recipe: dict[str, Any]
) -> None:
    plan = make_plan("llama-3.1-8b", cluster, layout, seq_len=2048, **recipe)
    finding = find_only(plan, name)
    assert finding.plan is not None
    slower = 100 * (finding.plan.step().seconds / plan.step().seconds - 1)
    assert slower > 10
    assert finding.change.endswith(f", {slower:.0f} % slower")


def test_larger_micro_batches_against_launch_bound_steps_leave_room() -> None:
    task = {"method": "qlora", "seq_len": 512, "micro_batch_size": 2, "recompute": "selective"}
    plan = make_plan("llama-3.2-1b", "2xrtx-5090-32gb", ss.Layout.fsdp2(), **task)
    finding = find_only(plan, "launch-bound")
    assert finding.plan is not None and not finding.plan.memory().is_tight
    assert finding.plan.recipe.micro_batch_size > 2
    # A larger one would be faster still, and fit, but tightly.
    larger = {"micro_batch_size": 2 * finding.plan.recipe.micro_batch_size}
    tight = replace(finding.plan, recipe=replace(finding.plan.recipe, **larger))
    assert tight.memory().fits and tight.memory().is_tight


def test_a_tight_fix_of_a_launch_bound_step_says_so_where_no_other_is_near() -> None:
    """Of a batch of 11 sequences on each rank, the micro-batch is 1 or 11."""
    task = {"method": "lora", "seq_len": 2048, "micro_batch_size": 1, "global_batch_size": 88}
    plan = make_plan("llama-3.2-1b", "8xh100-sxm-80gb", ss.Layout.zero(3), **task)
    finding = find_only(plan, "launch-bound")
    assert finding.plan is not None and finding.plan.memory().is_tight
    assert finding.change == "Micro-batch 11, which is tight"


def test_a_fix_that_the_recipe_refuses_is_text_only() -> None:
    recipe = {"precision": "bf16", "kernels": "compiled", "recompute": "full"}
    plan = make_plan("llama-3.2-1b", layout=ss.Layout.ddp(), **recipe)
    for name in ("updates-round-away", "reductions-in-half-precision"):
        assert "Mixed precision (bf16)" in find_only(plan, name).change


def test_a_supported_precision_that_does_not_fit_is_reported_as_such() -> None:
    plan = make_plan("gpt2-xl", "8xv100-sxm-32gb", ss.Layout.ddp(), seq_len=512, precision="bf16")
    finding = find_only(plan, "bf16-is-not-there")
    assert fits(plan, plan.memory()) and finding.plan is not None
    assert not fits(finding.plan, finding.plan.memory()) and "which lacks" in finding.change


def test_updates_below_bf16_resolution_are_reported() -> None:
    plan = make_plan(precision="bf16")
    finding = find_only(plan, "updates-round-away")
    assert finding.number == 100 / 256
    with_task = find_by_name(plan, "updates-round-away", ss.Pretrain(learning_rate=1e-3))
    assert with_task is not None and "0.26" in with_task.why, "1e-3 x 256"
    assert finding.plan is not None and find_by_name(finding.plan, "updates-round-away") is None
    assert find_by_name(make_plan(precision="bf16", method="lora"), "updates-round-away") is None
    assert find_by_name(make_plan(precision="bf16", layout=ss.Layout.zero()), "updates-round-away") is None
    # What fits only in bf16 is told what wider numbers lack.
    full = make_plan("qwen2.5-14b", precision="bf16", micro_batch_size=2, recompute="selective")
    wide = find_only(full, "updates-round-away")
    assert wide.plan is not None and fits(full, full.memory())
    short = wide.plan.memory().peak_bytes - wide.plan.memory().usable_bytes
    assert short > 0 and f"which lacks {format_gib(short)} GiB of GPU memory" in wide.change


# -------------------------------------------------------------------------------------------- widths


def test_an_unaligned_vocabulary_is_reported() -> None:
    plan = make_plan("gpt2", "8xa100-sxm-80gb", seq_len=1024)
    finding = find_only(plan, "width-misses-matrix-units")
    assert finding.number == 50_257 and finding.severity == "warning"
    assert " is 50,257: no multiple of " in finding.why, "no other width misses"
    assert finding.plan is not None and finding.plan.architecture.vocab_size == 50_304
    assert find_by_name(finding.plan, "width-misses-matrix-units") is None
    assert find_by_name(make_plan(), "width-misses-matrix-units") is None
    assert find_by_name(make_plan("gpt2", "2xcpu", seq_len=1024), "width-misses-matrix-units") is None


def test_widths_are_those_of_one_tensor_parallel_rank() -> None:
    plan = make_plan(layout=ss.Layout.megatron(tp=4), seq_len=1024, micro_batch_size=2)
    assert list(list_widths_on_rank(plan).values()) == [
        4096, 14336 // 4, 32 // 4 * 128, 8 // 4 * 128, 128_512 // 4, 2 * 1024,
    ]  # fmt: skip


def test_an_unaligned_number_of_tokens_is_reported() -> None:
    finding = find_only(make_plan(seq_len=1001), "width-misses-matrix-units")
    assert finding.severity == "hint" and finding.number == 1001
    assert finding.plan is not None and finding.plan.recipe.seq_len == 1008


@pytest.mark.parametrize(
    ("layout", "recipe", "aligned"),
    [
        (ss.Layout.fsdp2(cp=2), {"seq_len": 1000}, 1008),
        (ss.Layout.fsdp2(cp=4), {"seq_len": 1000, "micro_batch_size": 3, "global_batch_size": 48}, 1024),
        (ss.Layout.megatron(cp=4), {"seq_len": 1000, "micro_batch_size": 2}, 1008),
        # Multiples of 2 are enough for the matrix units, multiples of 4 for Megatron-core's halves.
        (ss.Layout.megatron(cp=2), {"seq_len": 1004, "micro_batch_size": 2}, 1008),
    ],
    ids=["fsdp2", "micro-batch 3", "megatron", "halves"],
)
def test_tokens_are_aligned_on_each_context_parallel_rank(
    layout: ss.Layout, recipe: dict[str, Any], aligned: int
) -> None:
    finding = find_only(make_plan(layout=layout, **recipe), "width-misses-matrix-units")
    assert finding.change == f"seq_len={aligned} instead of {recipe['seq_len']}"
    assert finding.plan is not None and finding.plan.recipe.seq_len == aligned
    assert find_by_name(finding.plan, "width-misses-matrix-units") is None


@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    plan=plans(),
    more_tokens=st.sampled_from([0, 2, 8, 24]),
    more_rows=st.sampled_from([0, 3]),
    wider=st.sampled_from([0, 4]),
)
def test_a_fix_changes_the_plan_and_removes_the_width(
    plan: ss.Plan, more_tokens: int, more_rows: int, wider: int
) -> None:
    arch, recipe = plan.architecture, plan.recipe
    arch = replace(
        arch, vocab_size=arch.vocab_size + more_rows, intermediate_size=arch.intermediate_size + wider
    )
    try:
        plan = replace(plan, architecture=arch, recipe=replace(recipe, seq_len=recipe.seq_len + more_tokens))
    except ValueError:  # A layout may not divide these widths.
        return
    for finding in plan.findings():
        assert finding.plan != plan, finding
        if finding.name != "width-misses-matrix-units" or finding.plan is None:
            continue
        after = find_by_name(finding.plan, finding.name)
        width, _, _ = finding.why.partition(" on one rank")
        assert after is None or (width not in after.why and " too)" in finding.why), (finding, after)


def test_a_width_too_small_for_tp_is_reported() -> None:
    arch = replace(ss.models["llama-3.1-8b"], intermediate_size=14_368)
    plan = ss.Plan(arch, ss.Cluster.parse("8xh100-sxm-80gb"), ss.Recipe(), ss.Layout.megatron(tp=8))
    finding = find_only(plan, "width-misses-matrix-units")
    assert finding.number == 14_368 / 8
    assert finding.plan is not None and 14_368 // finding.plan.degrees.tp % 8 == 0


def test_a_width_that_is_slower_on_a100() -> None:
    # BLOOM's team changed a hidden size of 14,400 for this: an eighth of it is no multiple of 64.
    def plan_of_width(hidden_size: int, gpu: str = "a100-sxm-80gb") -> ss.Plan:
        heads = {"num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": hidden_size // 32}
        arch = replace(
            ss.models["gpt2"],
            hidden_size=hidden_size,
            intermediate_size=4 * hidden_size,
            num_hidden_layers=8,
            **heads,
        )
        recipe = ss.Recipe(seq_len=1024)
        return ss.Plan(arch, ss.Cluster.parse(f"8x{gpu}"), recipe, ss.Layout.megatron(tp=8))

    slow, even = plan_of_width(14_400), plan_of_width(14_336)
    finding = find_only(slow, "width-off-128-bytes")
    assert "7,200" in finding.why and "queries" in finding.why
    assert find_by_name(even, "width-off-128-bytes") is None
    each_flop = [plan.step().parts["matrices"] / plan.step().model_flops for plan in (slow, even)]
    assert 1 + 0.8 * finding.number / 100 < each_flop[0] / each_flop[1] < 1 + 1.1 * finding.number / 100
    assert find_by_name(plan_of_width(14_400, "h100-sxm-80gb"), "width-off-128-bytes") is None, (
        "no run says so"
    )
    assert find_by_name(make_plan(), "width-off-128-bytes") is None


def test_a_fine_tune_is_not_told_to_use_another_model() -> None:
    """LoRA over gpt-oss on A100 was told of "a model with intermediate_size=2,944"."""
    cluster, layout = ss.Cluster.parse("16x4xa100-sxm-40gb"), ss.Layout.fsdp2(tp=2)
    full, adapters = (
        ss.Plan(ss.models["gpt-oss-20b"], cluster, ss.Recipe(method=method), layout)
        for method in ("full", "lora")
    )
    assert "A model with" in find_only(full, "width-off-128-bytes").change
    assert find_by_name(adapters, "width-off-128-bytes") is None
    in_fp32 = replace(full, recipe=ss.Recipe(precision="fp32"))
    assert find_by_name(in_fp32, "width-off-128-bytes") is None, "no run in fp32 says so"


def test_a_vocabulary_with_much_padding_is_reported() -> None:
    arch = replace(ss.models["llama-2-7b"], vocab_size=33_000)
    layout = ss.Layout.megatron(tp=32)
    plan = ss.Plan(arch, ss.Cluster.parse("4x8xh100-sxm-80gb"), ss.Recipe(global_batch_size=64), layout)
    finding = find_only(plan, "vocabulary-padded-much")
    # To the next multiple of 128 x 32.
    assert finding.number == pytest.approx(100 * (1 - 33_000 / 36_864))
    assert finding.plan is not None
    assert find_by_name(finding.plan, "vocabulary-padded-much") is None
    assert find_by_name(make_plan(layout=ss.Layout.megatron(tp=8)), "vocabulary-padded-much") is None
    # Where tp cannot be less, for the model would not fit, the vocabulary can be more.
    small = replace(arch, vocab_size=129)
    plan = ss.Plan(small, ss.Cluster.parse("8xh100-sxm-80gb"), ss.Recipe(), ss.Layout.megatron(tp=1))
    finding = find_only(plan, "vocabulary-padded-much")
    assert finding.plan is not None and finding.plan.architecture.vocab_size == 256
    assert finding.plan.architecture.name == f"{small.name}-vocab-256"
    assert find_by_name(finding.plan, "vocabulary-padded-much") is None


@pytest.mark.parametrize(
    ("width", "changed"),
    [
        ("hidden size", {"hidden_size": 4100}),
        ("width of the MLP", {"intermediate_size": 11_001}),
        ("width of the queries", {"num_attention_heads": 31, "num_key_value_heads": 31, "head_dim": 129}),
    ],
)
def test_a_width_that_tp_cannot_align_gets_another_model(width: str, changed: dict[str, int]) -> None:
    arch = replace(ss.models["llama-2-7b"], name="mine", **changed)
    plan = ss.Plan(arch, ss.Cluster.parse("8xh100-sxm-80gb"), ss.Recipe(), ss.Layout.fsdp2())
    finding = find_only(plan, "width-misses-matrix-units")
    assert width in finding.why and finding.plan is not None
    assert finding.plan.architecture.name.startswith("mine-") and "A model with" in finding.change
    (field, value), *_ = [
        (name, getattr(finding.plan.architecture, name))
        for name in changed
        if getattr(finding.plan.architecture, name) != changed[name]
    ]
    assert changed[field] < value < changed[field] + 8
    after = find_by_name(finding.plan, "width-misses-matrix-units")
    assert after is None or width not in after.why


# ---------------------------------------------------------------------------------------------- room


def test_a_shortage_of_host_memory_is_reported() -> None:
    plan = make_plan(
        "llama-3.1-70b", "h100-sxm-80gb", ss.Layout.zero(offload_optimizer="cpu", offload_params="cpu"),
        recompute="full",
    )  # fmt: skip
    small = replace(plan, cluster=replace(plan.cluster, host_memory_bytes=2**37, nvme_bytes=2**43))
    finding = find_only(small, "out-of-host-memory")
    assert finding.severity == "danger" and finding.number is not None and finding.number > 100
    large = replace(plan, cluster=replace(plan.cluster, host_memory_bytes=2**41))
    assert find_by_name(large, "out-of-host-memory") is None


def test_short_or_unknown_nvme_is_reported() -> None:
    layout = ss.Layout.zero(offload_optimizer="nvme", offload_params="nvme")
    plan = make_plan("llama-3.1-70b", "h100-sxm-80gb", layout, recompute="full")
    unknown = replace(plan, cluster=replace(plan.cluster, nvme_bytes=None))
    needed = plan.memory().nvme_bytes
    finding = find_only(unknown, "nvme-not-known")
    assert finding.number == needed / 2**30 and finding.severity == "warning"
    assert finding.change == "Set Cluster.nvme_bytes"
    assert finding.question is not None and finding.question.field == "nvme_bytes"
    small = replace(plan, cluster=replace(plan.cluster, nvme_bytes=2**38))
    assert find_only(small, "out-of-nvme").number == (needed - 2**38) / 2**30
    large = replace(plan, cluster=replace(plan.cluster, nvme_bytes=2**43))
    assert not {"out-of-nvme", "nvme-not-known"} & {finding.name for finding in large.findings()}


def test_unknown_host_memory_that_building_the_model_needs() -> None:
    layout = ss.Layout.fsdp2(offload="cpu")
    plan = make_plan("llama-3.1-8b", "8xh100-sxm-80gb", layout, recompute="full")
    unknown = replace(plan, cluster=replace(plan.cluster, host_memory_bytes=None))
    finding = find_only(unknown, "host-memory-not-known")
    assert finding.number == pytest.approx(8 * plan.memory().host_bytes / 2**30)
    assert finding.change == "Set Cluster.host_memory_bytes" and finding.severity == "warning"
    assert finding.question is not None and finding.question.field == "host_memory_bytes"
    assert find_by_name(plan, "host-memory-not-known") is None
    # All ranks of a node load the model at the same time, before any of it is sharded.
    name = "out-of-host-memory-at-start"
    plan = make_plan("llama-3.2-1b", layout=ss.Layout.ddp())
    (building,) = [need for need in list_memory_needs(plan, plan.memory()) if need.name.endswith("is built")]
    room = building.needed_bytes - 2**30
    small = replace(plan, cluster=replace(plan.cluster, host_memory_bytes=room))
    assert find_only(small, name).number == 1.0
    assert find_by_name(plan, name) is None
    unknown = replace(plan, cluster=replace(plan.cluster, host_memory_bytes=None))
    assert find_only(unknown, "host-memory-at-start-not-known").number == building.needed_bytes / 2**30


def test_a_gpu_that_is_nearly_full() -> None:
    name = "gpu-nearly-full"
    # Already of one sequence and whole layers: another layout would have to do it.
    plan = make_plan("qwen3-30b-a3b", layout=ss.Layout.megatron(ep=8), recompute="full", micro_batch_size=1)
    finding, memory = find_only(plan, name).run_search(), plan.memory()
    assert memory.is_tight and finding.severity == "warning"
    assert finding.plan is not None and not finding.plan.memory().is_tight
    assert type(finding.plan.layout) is not type(plan.layout) and finding.plan.layout.title in finding.change
    assert finding.number == pytest.approx(100 * memory.peak_bytes / memory.usable_bytes)
    eased = make_plan(
        "gpt2", "l4-24gb", ss.Layout.ddp(), seq_len=1024, micro_batch_size=12, global_batch_size=12
    )
    fixed = find_only(eased, name).plan
    assert fixed is not None and fixed.memory().fits and not fixed.memory().is_tight
    assert find_by_name(make_plan("gpt2", seq_len=1024), name) is None
    full = make_plan(micro_batch_size=2)
    assert not full.memory().fits and find_by_name(full, name) is None, "what does not fit is said as such"


def test_a_shortage_that_no_single_change_ends_names_the_method_that_combines_changes() -> None:
    finding = find_only(make_plan("llama-3.1-405b", micro_batch_size=8), "out-of-gpu-memory")
    method = finding.change.rpartition("by plan.")[2].removesuffix("()")
    assert finding.plan is None and callable(getattr(ss.Plan, method))


def test_a_single_change_that_is_slow_is_named_and_several_are_searched() -> None:
    """Activations on the host fit, at over twice the time; a search has a plan that is faster."""
    plan = make_plan("llama-3.1-70b", "2x8xh100-sxm-80gb", ss.Layout.zero(), global_batch_size=64)
    (slow,) = [repair for repair in plan.repairs() if repair.plan.recipe.method == "full"][:1]
    finding = find_only(plan, "out-of-gpu-memory")
    assert finding.plan is None and slow.change in finding.change and "% slower" in finding.change
    fixed = finding.run_search().plan
    assert fixed is not None and fits(fixed, fixed.memory())
    assert fixed.step().seconds < 0.8 * slow.plan.step().seconds


@thorough()
def test_a_shortage_of_gpu_memory_has_the_cheapest_repair() -> None:
    plan = make_plan("llama-3.1-8b", layout=ss.Layout.ddp(), recompute="full")
    finding = find_only(plan, "out-of-gpu-memory")
    report = plan.memory()
    assert finding.number == (report.peak_bytes - report.usable_bytes) / 2**30
    same = [repair for repair in plan.repairs() if repair.plan.recipe.method == "full"]
    best = next(repair for repair in same if repair.plan.recipe.precision == "bf16-mixed")
    assert same[0].seconds_lost <= best.seconds_lost, "narrower numbers may be cheaper, and come last"
    assert (finding.plan, finding.change) == (best.plan, best.change)
    assert finding.plan is not None and fits(finding.plan, finding.plan.memory())
    hopeless = find_only(make_plan("llama-3.1-405b", micro_batch_size=8), "out-of-gpu-memory").run_search()
    assert hopeless.plan is not None and fits(hopeless.plan, hopeless.plan.memory())
    nodes = hopeless.plan.cluster.num_nodes
    assert nodes > 1 and f"GPUs 8xh100-sxm-80gb → {nodes}x8xh100-sxm-80gb" in hopeless.change
    assert "method full → lora" in hopeless.change
    assert find_by_name(make_plan(), "out-of-gpu-memory") is None


# --------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        (ss.Layout.zero(stage=3), 16),
        (ss.Layout.zero(stage=2, tp=2), 8),
        (ss.Layout.megatron(tp=4, pp=2), None),
        (ss.Layout.megatron(), None),
        (ss.Layout.fsdp2(), None),
        (ss.Layout.ddp(), None),
    ],
    ids=lambda value: value.description if isinstance(value, ss.Layout) else str(value),
)
def test_checkpoint_formats_tied_to_the_number_of_ranks(layout: ss.Layout, ranks: int | None) -> None:
    plan = make_plan("llama-3.2-1b", "2x8xh100-sxm-80gb", layout)
    finding = find_by_name(plan, "checkpoint-tied-to-ranks")
    assert (None if finding is None else finding.number) == ranks
    if finding is None:
        return
    # What loads over any ranks cuts model and state the same way.
    assert finding.plan is not None and find_by_name(finding.plan, "checkpoint-tied-to-ranks") is None
    assert (finding.plan.degrees.tp, finding.plan.degrees.shard) == (plan.degrees.tp, plan.degrees.shard)
    assert finding.plan.layout.description in finding.change and "ds_to_universal" in finding.change


def test_the_fix_of_a_tied_checkpoint_keeps_offload() -> None:
    layout = ss.Layout.zero(offload_optimizer="cpu", offload_params="cpu")
    # Without gradient accumulation, which FSDP2 does on the host.
    plan = make_plan("llama-3.1-70b", layout=layout, recompute="full", global_batch_size=8)
    assert fits(plan, plan.memory())
    finding = find_only(plan, "checkpoint-tied-to-ranks")
    assert finding.plan is not None and fits(finding.plan, finding.plan.memory())
    assert getattr(finding.plan.layout, "offload", None) == "cpu"


@pytest.mark.parametrize(
    ("model", "cluster", "layout", "cost"),
    [
        ("llama-3.2-1b", "2x8xh100-sxm-80gb", ss.Layout.zero(stage=3), ""),
        ("llama-3.2-3b", "8xl40s-48gb", ss.Layout.zero(stage=2), "5 % slower"),
        ("llama-3.1-8b", "8xh100-sxm-80gb", ss.Layout.zero(stage=2), "33 % faster"),
        # FSDP2's defaults take over 10 % longer.
        ("llama-3.2-3b", "8xh100-pcie-80gb", ss.Layout.zero(stage=2), "17 % faster"),
    ],
    ids=["no noticeable cost", "slower", "faster", "weights kept"],
)
def test_the_fix_of_a_tied_checkpoint_states_its_cost(
    model: str, cluster: str, layout: ss.Layout, cost: str
) -> None:
    plan = make_plan(model, cluster, layout)
    finding = find_only(plan, "checkpoint-tied-to-ranks")
    assert finding.plan is not None and finding.plan.step().seconds < 1.1 * plan.step().seconds
    assert re.findall(r"\d+ % \w+", finding.change) == ([cost] if cost else [])
    kept = finding.plan.layout.reshard_after_forward is False  # type: ignore[attr-defined]
    assert kept == ("weights kept" in finding.change)


def test_a_much_slower_plan_is_no_fix_of_a_tied_checkpoint() -> None:
    """FSDP2 would gather the frozen base over the link between nodes, which ZeRO-1 never does."""
    recipe = {"method": "lora", "precision": "bf16", "global_batch_size": 64}
    plan = make_plan("llama-3.1-8b", "2x1xh100-sxm-80gb", ss.Layout.zero(stage=1), **recipe)
    finding = find_only(plan, "checkpoint-tied-to-ranks")
    assert finding.plan is None and "ds_to_universal" in finding.change
    other = finding.run_search()
    assert other.plan is not None and find_by_name(other.plan, "checkpoint-tied-to-ranks") is None
    assert other.plan.step().seconds < 1.02 * plan.step().seconds and other.change.startswith("DDP instead")


def test_every_framework_has_defaults() -> None:
    for name, framework in frameworks.items():
        defaults = framework.defaults()
        plan = make_plan("llama-3.2-1b", layout=framework.layout_class())
        assert defaults.get_reduce_type(plan) in ("fp32", "bf16", "fp16")
        assert defaults.pad_vocab_size(plan) >= plan.architecture.vocab_size
        assert defaults.get_checkpoint_format(plan).source, name


@pytest.mark.parametrize(
    ("layout", "named", "where"),
    [
        (ss.Layout.zero(2, stage3_prefetch_bucket_size=10**6), "stage3_prefetch_bucket_size", "in stage 3"),
        (ss.Layout.zero(3, offload_optimizer_buffer_count=7), "offload_optimizer_buffer_count", "with NVMe"),
        (ss.Layout.zero(3, pin_memory=False), "pin_memory", "with offloading"),
        (
            ss.Layout.zero(2, communication_data_type="fp32"),
            "communication_data_type",
            "in half precision",
        ),
        (ss.Layout.megatron(cross_entropy_fusion_impl="te"), "cross_entropy_fusion_impl", "loss='fused'"),
    ],
)
def test_an_unused_option_is_reported(layout: ss.Layout, named: str, where: str) -> None:
    recipe = ss.Recipe(precision="fp32" if "half precision" in where else "bf16-mixed")
    plan = ss.Plan(ss.models["llama-3.1-8b"], ss.Cluster.parse("8xh100-sxm-80gb"), recipe, layout)
    (findings,) = [finding for finding in plan.findings() if finding.name == "option-without-use"]
    assert named in findings.why and where in findings.why and findings.number == 1
    assert findings.plan is not None and getattr(findings.plan.layout, named) != getattr(layout, named)
    assert findings.plan.memory().components == plan.memory().components
    assert not any(finding.name == "option-without-use" for finding in findings.plan.findings())


@pytest.mark.parametrize(
    "layout",
    [
        ss.Layout.zero(3, stage3_prefetch_bucket_size=10**6),
        ss.Layout.zero(2, reduce_bucket_size=10**6, offload_optimizer="cpu", pin_memory=False),
        ss.Layout.zero(0, communication_data_type="fp32"),
        ss.Layout.fsdp2(reshard_after_forward=False),
        ss.Layout.megatron(overlap_grad_reduce=True),
    ],
)
def test_a_used_option_is_not_reported(layout: ss.Layout) -> None:
    plan = ss.Plan(ss.models["llama-3.1-8b"], ss.Cluster.parse("8xh100-sxm-80gb"), ss.Recipe(), layout)
    assert not any(finding.name == "option-without-use" for finding in plan.findings())


def test_a_fix_with_another_framework_keeps_fp32_master_weights() -> None:
    """DeepSpeed's "bf16" has them, FSDP2's has not."""
    plan = ss.Plan(
        ss.models["llama-3.1-8b"],
        ss.Cluster.parse("8xh100-sxm-80gb"),
        ss.Recipe(global_batch_size=64, precision="bf16", recompute="full"),
        ss.Layout.zero(stage=2),
    )
    (tied,) = [finding for finding in plan.findings() if finding.name == "checkpoint-tied-to-ranks"]
    assert tied.plan is not None and tied.plan.recipe.precision == "bf16-mixed"
    assert "FSDP2 in bf16-mixed" in tied.change
    assert "updates-round-away" not in {finding.name for finding in tied.plan.findings()}


def test_a_narrower_model_aligns_a_width_if_a_wider_one_does_not_fit() -> None:
    model = replace(ss.models["llama-3.1-8b"], intermediate_size=14336 + 8)
    for recipe, better in ((ss.Recipe(seq_len=512), 14336 + 64), (ss.Recipe(seq_len=512), 14336)):
        plan = ss.Plan(model, ss.Cluster.parse("8xh100-sxm-80gb"), recipe, ss.Layout.fsdp2())
        if better < model.intermediate_size:
            plan = short_of_room(plan)
        assert plan.memory().fits
        words, found = align_width(plan, "width of the MLP", 64)
        assert found is not None and found.architecture.intermediate_size == better
        assert f"intermediate_size={better:,}" in words and found.memory().fits


def short_of_room(plan: ss.Plan) -> ss.Plan:
    """The same on cards that have a few bytes more than it needs."""
    used = plan.memory().peak_bytes + 1024
    gpu = replace(plan.cluster.gpu, name="small", memory_bytes=used, usable_bytes=used)
    return replace(plan, cluster=replace(plan.cluster, gpu=gpu))


def test_a_mask_with_which_cudnn_returns_nan_is_reported() -> None:
    name = "masked-attention-can-be-nan"
    finding = find_only(make_plan("qwen2.5-7b", packing=True, seq_len=2112), name)
    assert finding.plan is not None and finding.plan.recipe.seq_len == 2048
    assert find_by_name(finding.plan, name) is None
    # Without a mask, with a kernel that takes none, and on other GPUs.
    assert find_by_name(make_plan("qwen2.5-7b", seq_len=2112), name) is None
    assert find_by_name(make_plan("qwen2.5-7b", packing=True, seq_len=2112, attention="flash"), name) is None
    assert find_by_name(make_plan("qwen2.5-7b", "8xa100-sxm-80gb", packing=True, seq_len=2112), name) is None
    # A sliding window that is shorter than the sequence is a mask too.
    find_only(make_plan("mistral-7b", seq_len=4160), name)
