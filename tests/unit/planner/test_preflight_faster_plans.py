"""Findings about settings that cost time and gain nothing: fp32, needless offload, pipeline bubbles,
small micro-batches; and fixes that leave the room that a plan has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from tests.requirements import thorough

import shardscope as ss
from shardscope.frameworks.registry import is_trained
from shardscope.planner.checks import Finding, pipeline
from shardscope.planner.checks.case import Change, Variant, evaluate_variants
from shardscope.planner.memory_needs import fits
from shardscope.planner.verdict import assess_plan

FP32 = "fp32-though-half-precision-is-faster"
OFFLOADED = "state-offloaded-though-room"
BUBBLE = "pipeline-bubble"
REPEATED = "micro-batches-repeat-transfers"


def make_plan(model: str, cluster: str, layout: ss.Layout, **recipe: Any) -> ss.Plan:
    return ss.Plan(ss.models[model], ss.Cluster.parse(cluster), ss.Recipe(**recipe), layout)


def find_by_name(plan: ss.Plan, name: str) -> Finding | None:
    return next((finding for finding in plan.findings() if finding.name == name), None)


def check_fix(plan: ss.Plan, name: str) -> tuple[Finding, ss.Plan]:
    """Return the finding and its plan, which is as much faster as it says, fits, and has no such finding."""
    finding = find_by_name(plan, name)
    assert finding is not None and finding.plan is not None
    won = plan.step().seconds - finding.plan.step().seconds
    assert finding.number == pytest.approx(won) and won >= 0.02 * plan.step().seconds
    assert assess_plan(finding.plan).state in ("fits", "unknown")
    assert is_trained(finding.plan) or not is_trained(plan)
    assert finding.plan.recipe.global_batch_size == plan.recipe.global_batch_size
    assert find_by_name(finding.plan, name) is None
    return finding, finding.plan


# ------------------------------------------------------------------------------------------ precision


@pytest.mark.parametrize(
    ("model", "cluster", "layout", "recipe", "precision"),
    [
        ("llama-3.1-8b", "8xh100-sxm-80gb", ss.Layout.fsdp2(), {"recompute": "full"}, "bf16-mixed"),
        ("llama-3.2-1b", "rtx-4090-24gb", ss.Layout.ddp(), {"method": "lora"}, "bf16-mixed"),
        ("llama-3.2-1b", "8xv100-sxm-32gb", ss.Layout.fsdp2(), {"recompute": "full"}, "fp16-mixed"),
    ],
    ids=["full", "LoRA", "a GPU without bf16"],
)
def test_fp32_is_reported_where_half_precision_is_faster(
    model: str, cluster: str, layout: ss.Layout, recipe: dict[str, Any], precision: str
) -> None:
    plan = make_plan(model, cluster, layout, precision="fp32", seq_len=2048, **recipe)
    _, fixed = check_fix(plan, FP32)
    assert fixed == replace(plan, recipe=replace(plan.recipe, precision=precision))


def test_fp32_on_cpu_ranks_is_not_reported() -> None:
    plan = make_plan("smollm2-135m", "2xcpu", ss.Layout.ddp(), precision="fp32", seq_len=512)
    assert find_by_name(plan, FP32) is None


# -------------------------------------------------------------------------------------------- offload


@pytest.mark.parametrize(
    "layout",
    [
        ss.Layout.zero(stage=2, offload_optimizer="cpu"),
        ss.Layout.zero(stage=3, offload_optimizer="cpu", offload_params="cpu"),
        ss.Layout.fsdp2(offload="cpu"),
    ],
)
def test_state_that_is_offloaded_although_the_gpus_have_room_is_reported(layout: ss.Layout) -> None:
    plan = make_plan("llama-3.1-8b", "8xh100-sxm-80gb", layout)
    finding, fixed = check_fix(plan, OFFLOADED)
    assert "offload" not in fixed.layout.description and finding.severity == "warning"
    assert fixed.recipe == plan.recipe and "on the GPU" in finding.change


def test_a_size_of_the_host_that_is_not_known_does_not_keep_the_optimizer_there() -> None:
    """Building the model needs host memory as well, before and after."""
    plan = make_plan(
        "smollm2-360m", "rtx-4090-24gb", ss.Layout.zero(stage=2, offload_optimizer="cpu"), seq_len=1024
    )
    assert plan.cluster.host_memory_bytes is None
    _, fixed = check_fix(plan, OFFLOADED)
    assert fixed.layout == ss.Layout.zero(stage=2)


def test_state_on_nvme_although_host_memory_suffices_is_reported() -> None:
    room = {"host_memory_bytes": 512 * 2**30, "nvme_bytes": 2 * 10**12}
    cluster = replace(ss.Cluster.parse("2xrtx-4090-24gb"), nvme_bandwidth_bytes_per_second=6e9, **room)
    layout = ss.Layout.zero(stage=3, offload_optimizer="nvme", offload_params="cpu")
    plan = ss.Plan(ss.models["llama-3.1-8b"], cluster, ss.Recipe(recompute="full"), layout)
    finding, fixed = check_fix(plan, OFFLOADED)
    assert finding.change == "Offload the optimizer to the host"
    assert fixed.layout == replace(layout, offload_optimizer="cpu")
    # Nor do options of NVMe stay, which DeepSpeed would ignore.
    both = replace(plan, layout=ss.Layout.zero(stage=3, offload_optimizer="nvme", offload_params="nvme"))
    _, fixed = check_fix(both, OFFLOADED)
    assert "nvme" not in str(fixed.layout) and find_by_name(fixed, "option-without-use") is None
    # Host memory of unknown size is no place to rely on.
    unknown = replace(plan, cluster=replace(cluster, host_memory_bytes=None))
    assert find_by_name(unknown, OFFLOADED) is None


def test_offload_without_which_a_plan_does_not_fit_is_not_reported() -> None:
    layout = ss.Layout.zero(stage=3, offload_optimizer="cpu", offload_params="cpu")
    plan = make_plan("llama-3.1-8b", "2xrtx-4090-24gb", layout, recompute="full")
    assert plan.memory().fits and find_by_name(plan, OFFLOADED) is None


# ------------------------------------------------------------------------------------------- pipeline


def test_a_bubble_that_interleaved_chunks_shorten_is_reported() -> None:
    plan = make_plan("llama-3.1-8b", "8xh100-sxm-80gb", ss.Layout.megatron(pp=4), global_batch_size=16)
    finding, fixed = check_fix(plan, BUBBLE)
    assert plan.step().parts["bubble"] > 0.2 * plan.step().seconds and finding.severity == "warning"
    assert fixed.layout == replace(plan.layout, vpp=fixed.degrees.vpp) and fixed.degrees.vpp > 1
    assert fixed.step().parts["bubble"] < 0.5 * plan.step().parts["bubble"]


def test_a_bubble_that_smaller_micro_batches_shorten_is_reported() -> None:
    recipe: dict[str, Any] = {"global_batch_size": 32, "micro_batch_size": 4, "recompute": "full"}
    plan = make_plan("llama-3.1-8b", "8xh100-sxm-80gb", ss.Layout.zero(stage=1, pp=4), **recipe)
    _, fixed = check_fix(plan, BUBBLE)
    assert fixed.layout == plan.layout and fixed.recipe.micro_batch_size < 4


def test_chunks_that_shorten_a_bubble_are_equal_and_few_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eleven chunks of 15 layers were the fix, after 63 predictions: findings took 120 ms instead of 3."""
    evaluated: list[Change] = []

    def evaluate(plan: ss.Plan, changes: Iterable[Change]) -> Iterator[Variant]:
        evaluated.extend(listed := list(changes))
        return evaluate_variants(plan, listed)

    monkeypatch.setattr(pipeline, "evaluate_variants", evaluate)
    layout = ss.Layout.fsdp2(pp=2)
    recipe: dict[str, Any] = {"global_batch_size": 64, "micro_batch_size": 8, "seq_len": 1024}
    plan = make_plan("smollm2-135m", "8xa100-sxm-40gb", layout, **recipe)
    assert plan.architecture.num_hidden_layers == 30
    _, fixed = check_fix(plan, BUBBLE)
    evaluated.clear()
    assert find_by_name(plan, BUBBLE) is not None and len(evaluated) < 40
    assert 15 % fixed.degrees.vpp == 0


def test_a_bubble_of_many_micro_batches_is_not_reported() -> None:
    plan = make_plan(
        "llama-3.1-8b", "8xh100-sxm-80gb", ss.Layout.megatron(pp=2), global_batch_size=512, recompute="full"
    )
    assert find_by_name(plan, BUBBLE) is None


# -------------------------------------------------------------------------------------- micro-batches


@pytest.mark.parametrize(
    ("model", "cluster", "layout", "repeated"),
    [
        ("llama-3.1-70b", "8xh100-sxm-80gb", ss.Layout.fsdp2(offload="cpu"), "to and from the host"),
        ("mixtral-8x7b", "8x8xa100-sxm-80gb", ss.Layout.zero(stage=3), "all-gathers"),
    ],
    ids=["offload", "all-gathers"],
)
def test_micro_batches_that_repeat_transfers_are_reported(
    model: str, cluster: str, layout: ss.Layout, repeated: str
) -> None:
    machine = replace(ss.Cluster.parse(cluster), host_memory_bytes=2000 * 2**30)
    recipe = ss.Recipe(recompute="full", global_batch_size=256 if machine.num_gpus == 64 else 64)
    plan = ss.Plan(ss.models[model], machine, recipe, layout)
    finding, fixed = check_fix(plan, REPEATED)
    assert repeated in finding.why and not fixed.memory().is_tight
    assert fixed.layout == plan.layout and fixed.recipe.micro_batch_size > 1


def test_a_launch_bound_plan_does_not_become_tight_for_less_than_a_third() -> None:
    """Micro-batch 8 was offered, which is tight, and then micro-batch 4 again."""
    cluster, recipe = "8xa100-sxm-40gb", {"micro_batch_size": 4, "global_batch_size": 64, "precision": "bf16"}
    plan = make_plan("smollm2-135m", cluster, ss.Layout.fsdp2(), recompute="selective", loss="full", **recipe)
    larger = replace(plan, recipe=replace(plan.recipe, micro_batch_size=8))
    assert larger.memory().is_tight and larger.step().seconds < plan.step().seconds
    finding = find_by_name(plan, "launch-bound")
    assert finding is not None and finding.plan is None


def test_a_larger_micro_batch_is_near_the_fastest() -> None:
    """A micro-batch that saved 95 % of the step was offered, and then one that saves 26 % of the rest."""
    plan = make_plan(
        "llama-3.2-1b",
        "h100-sxm-80gb",
        ss.Layout.fsdp2(offload="cpu"),
        seq_len=256,
        global_batch_size=1152,
        micro_batch_size=3,
        recompute="full",
    )
    check_fix(plan, REPEATED)


def test_micro_batches_over_fast_links_are_not_reported() -> None:
    plan = make_plan("llama-3.1-8b", "8xh100-sxm-80gb", ss.Layout.fsdp2())
    assert find_by_name(plan, REPEATED) is None


# ----------------------------------------------------------------------------- fixes that leave room


def test_a_faster_degree_is_no_fix_if_the_plan_becomes_tight() -> None:
    """tp=4 was 8 % faster, and ``gpu-nearly-full``."""
    plan = make_plan(
        "llama-3.1-70b",
        "16x8xh100-sxm-80gb",
        ss.Layout.megatron(tp=8, pp=4),
        global_batch_size=256,
        seq_len=8192,
        recompute="selective",
    )
    finding = find_by_name(plan, "tensor-parallel-over-slow-link")
    assert finding is None or (finding.plan is not None and not finding.plan.memory().is_tight)


def test_more_recomputation_is_the_fix_if_less_leaves_the_plan_tight() -> None:
    recipe: dict[str, Any] = {"precision": "fp16-mixed", "micro_batch_size": 4, "seq_len": 1024}
    plan = make_plan("gpt2-medium", "4xt4-16gb", ss.Layout.ddp(), **recipe)
    finding = find_by_name(plan, "recomputation-off")
    assert finding is not None and finding.plan is not None
    assert finding.plan.memory().fits and not finding.plan.memory().is_tight


def test_a_tight_plan_keeps_its_framework_where_that_has_a_roomier_plan() -> None:
    """Megatron-core's modules were the fix of ZeRO-2, though ZeRO-3 had room."""
    plan = make_plan("llama-3.1-8b", "8xa100-sxm-40gb", ss.Layout.zero(stage=2), recompute="full")
    finding = find_by_name(plan, "gpu-nearly-full")
    assert finding is not None
    fixed = finding.run_search().plan
    assert fixed is not None and fixed.layout.framework == "deepspeed"
    assert not fixed.memory().is_tight and fixed.step().seconds <= 4 / 3 * plan.step().seconds


@thorough()
def test_a_plan_for_its_checkpoints_is_not_tight_if_this_one_has_room() -> None:
    recipe = ss.Recipe(recompute="full", global_batch_size=256)
    cluster = replace(ss.Cluster.parse("8x8xa100-sxm-80gb"), host_memory_bytes=2**40)
    plan = ss.Plan(ss.models["mixtral-8x7b"], cluster, recipe, ss.Layout.zero(stage=3))
    finding = find_by_name(plan, "checkpoint-tied-to-ranks")
    assert finding is not None
    fixed = finding.run_search().plan
    assert fixed is not None and not fixed.memory().is_tight


def test_a_single_change_that_is_too_slow_to_offer_is_not_denied() -> None:
    """Offload alone is enough, in 3.3 times the time: "no single change is enough" was wrong."""
    cluster = replace(ss.Cluster.parse("8xh100-sxm-80gb"), host_memory_bytes=2000 * 2**30)
    plan = ss.Plan(ss.models["llama-3.1-70b"], cluster, ss.Recipe(recompute="full"), ss.Layout.fsdp2())
    offloaded = replace(plan, layout=ss.Layout.fsdp2(offload="cpu"))
    assert fits(offloaded, offloaded.memory()) and offloaded.step().seconds > 3 * plan.step().seconds
    finding = find_by_name(plan, "out-of-gpu-memory")
    assert finding is not None and "enough within 3 times the step time" in finding.change
