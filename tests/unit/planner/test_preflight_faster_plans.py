"""Findings about settings that cost time and gain nothing: fp32, needless offload, pipeline bubbles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import shardscope as ss
from shardscope.frameworks.registry import is_trained
from shardscope.planner.checks import Finding
from shardscope.planner.verdict import assess_plan

FP32 = "fp32-though-half-precision-is-faster"
OFFLOADED = "state-offloaded-though-room"
BUBBLE = "pipeline-bubble"


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


def test_a_bubble_of_many_micro_batches_is_not_reported() -> None:
    plan = make_plan(
        "llama-3.1-8b", "8xh100-sxm-80gb", ss.Layout.megatron(pp=2), global_batch_size=512, recompute="full"
    )
    assert find_by_name(plan, BUBBLE) is None
