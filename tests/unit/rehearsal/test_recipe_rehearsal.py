"""Tests of rehearsals of other recipes than AdamW with full logits: support and prediction errors."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tests.accuracy.recipe_sampling import FRAMEWORKS, SEEDS, sample_plans, stored_file
from tests.accuracy.rehearsal_samples import in_words, is_same
from tests.accuracy.rehearsals import STORED, Rehearsed, read_rehearsals
from tests.requirements import few, thorough

import shardscope as ss
from shardscope.core.architecture import Architecture
from shardscope.core.plan import Plan
from shardscope.frameworks.ddp.rehearsal import rehearse as ddp
from shardscope.frameworks.fsdp2.rehearsal import rehearse as fsdp2
from shardscope.rehearsal.result import TENSOR_COMPONENTS, RehearsedStage

pytestmark = thorough()

MODULES: dict[str, Any] = {"ddp": ddp, "fsdp2": fsdp2}
EIGHT = ss.Cluster.parse("8xh100-sxm-80gb")
WITHIN_ONE_PERCENT = 0.95
"""Share of plans within 1 %: the goal, which is reached."""
WORST = 0.018
"""Largest error of today; the goal is 0.03."""


def has_unpredicted_reduction_buffer(row: Rehearsed) -> bool:
    """Return whether reduced gradients stay on the GPU until the last group (torch's ``AllReduceState``), as
    HSDP with offload does; no formula includes them yet."""
    layout: Any = row.plan.layout
    return bool(getattr(layout, "offload", None) and row.plan.degrees.replicate > 1)


@pytest.mark.parametrize("sample", SEEDS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_predictions_agree_with_both_samples(framework: str, sample: str) -> None:
    rows, rejected = read_rehearsals([stored_file(framework, sample)])
    assert not rejected and len(rows) >= 25
    sampled = sample_plans(framework, SEEDS[sample], len(rows))
    stored = {row.name.partition(":")[2]: row.plan for row in rows}
    # CPU ranks share the memory of the machine on which the plans were sampled.
    assert all(is_same(stored[str(index)], plan) for index, plan in enumerate(sampled))
    rows = [row for row in rows if framework == "ddp" or not has_unpredicted_reduction_buffer(row)]
    close = sum(abs(row.error) <= 0.01 for row in rows) / len(rows)
    worst = max(rows, key=lambda row: abs(row.error))
    assert close >= WITHIN_ONE_PERCENT, close
    assert abs(worst.error) <= WORST, in_words(worst)


@pytest.mark.parametrize("sample", SEEDS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_offloaded_tensors_in_host_memory_are_predicted(framework: str, sample: str) -> None:
    """Offloaded activations include autocast's copies of weights."""
    compared = 0
    for line in stored_file(framework, sample).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        plan = sample_plans(framework, SEEDS[sample], int(row["name"]) + 1)[-1]
        if plan.recipe.recompute == "offload":
            rehearsed = max(stage["host_bytes"] for stage in row["stages"])
            assert plan.memory().host_bytes == pytest.approx(rehearsed, rel=0.025), row["name"]
            compared += 1
    assert compared >= 5


def test_fsdp2_predictions_agree_with_rehearsals_of_nf4_in_mixed_precision() -> None:
    """All 13 sampled plans of FSDP2 over NF4 in bf16-mixed were within 0.5 % when first rehearsed."""
    rows, rejected = read_rehearsals([STORED / "fsdp2-nf4-mixed.jsonl"])
    assert not rejected and len(rows) == 13
    assert {(row.plan.recipe.base_quantization, row.plan.recipe.precision) for row in rows} == {
        ("nf4", "bf16-mixed")
    }
    worst = max(rows, key=lambda row: abs(row.error))
    assert abs(worst.error) <= 0.005, in_words(worst)


def test_the_samples_contain_every_new_recipe_option() -> None:
    drawn = [
        row.plan.recipe
        for framework in FRAMEWORKS
        for sample in SEEDS
        for row in read_rehearsals([stored_file(framework, sample)])[0]
    ]
    assert {recipe.optimizer for recipe in drawn} >= {"adamw_8bit", "adamw_foreach", "lion", "muon"}
    assert {recipe.base_quantization for recipe in drawn} == {None, "nf4", "int8"}
    assert {recipe.loss for recipe in drawn} >= {"chunked"}
    assert {recipe.recompute for recipe in drawn} == {"none", "selective", "full", "offload"}
    assert any(recipe.dropout for recipe in drawn) and any(recipe.lora_dropout for recipe in drawn)


def build_small_plan(layout: Any, cluster: ss.Cluster = EIGHT, **recipe: Any) -> Plan:
    sizes = {"seq_len": 128, "global_batch_size": cluster.num_gpus, **recipe}
    return Plan(Architecture.of_size("10m"), cluster, ss.Recipe(**sizes), layout)


def rehearse_stage(plan: Plan) -> RehearsedStage:
    (stage,) = MODULES[plan.layout.framework].rehearse(plan, lambda words, fraction: None)
    first: RehearsedStage = stage
    return first


def get_peak_components(stage: RehearsedStage, phase: str) -> dict[str, int]:
    peaks = [peak.components for peak in stage.peaks if peak.phase == phase]
    return max(peaks, key=lambda parts: sum(parts.values()))


OPTIMIZERS = {
    "ddp": ("adamw_foreach", "adamw_8bit", "adafactor", "lion", "muon"),
    "fsdp2": ("adamw_foreach", "adamw_8bit", "lion"),
}


@pytest.mark.parametrize(
    ("framework", "optimizer"),
    few(
        [(name, one) for name, found in OPTIMIZERS.items() for one in found],
        [("ddp", "muon"), ("fsdp2", "adamw_8bit")],
    ),
)
def test_predicted_optimizer_state_equals_rehearsal(framework: str, optimizer: str) -> None:
    plan = build_small_plan(getattr(ss.Layout, framework)(), optimizer=optimizer)
    stage, report = rehearse_stage(plan), plan.memory()
    # The tolerance is for step counters; the fused AdamW that Muon is combined with has one per tensor.
    for phase in ("rest", "optimizer"):
        assert get_peak_components(stage, phase)["optimizer"] == pytest.approx(
            report.at(phase)["optimizer"],
            abs=20_000,  # type: ignore[arg-type]
        )


@pytest.mark.parametrize(
    ("framework", "recipe"),
    few(
        [
            ("ddp", {"method": "qlora"}),
            ("ddp", {"method": "lora", "quantization": "nf4", "precision": "bf16"}),
            ("ddp", {"method": "lora", "quantization": "int8", "precision": "fp32"}),
            ("fsdp2", {"method": "qlora", "precision": "bf16"}),
        ],
        [("ddp", {"method": "qlora"})],
    ),
)
def test_a_quantized_base_is_packed_on_fake_tensors(framework: str, recipe: dict[str, Any]) -> None:
    from bitsandbytes import functional

    plan = build_small_plan(getattr(ss.Layout, framework)(), **recipe)
    tables = dict(functional.name2qmap)
    assert get_peak_components(rehearse_stage(plan), "rest")["parameters"] == pytest.approx(
        plan.memory().at("rest")["parameters"], abs=20_000
    )
    # The tables that bitsandbytes caches for the process are still real tensors.
    assert functional.name2qmap == tables
    packed = functional.quantize_4bit(torch.ones(4096), quant_type="nf4")[0]
    assert type(packed) is torch.Tensor


@thorough()
def test_a_quantized_base_that_is_built_on_the_meta_device_is_rehearsed() -> None:
    plan = Plan(Architecture.of_size("350m"), EIGHT, ss.Recipe(method="qlora", seq_len=128), ss.Layout.ddp())
    peak = rehearse_stage(plan).peak.num_bytes
    assert peak == pytest.approx(sum(plan.memory().components[name] for name in TENSOR_COMPONENTS), rel=0.02)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_offloaded_activations_are_in_host_memory_until_backward(framework: str) -> None:
    layout = getattr(ss.Layout, framework)()
    on_gpu, on_host = (
        rehearse_stage(build_small_plan(layout, precision="bf16", recompute=one))
        for one in ("none", "offload")
    )
    assert on_gpu.host_bytes == 0 < on_host.host_bytes
    assert (
        get_peak_components(on_host, "forward")["activations"]
        < get_peak_components(on_gpu, "forward")["activations"] / 2
    )
    assert "activations" not in get_peak_components(on_host, "rest")
    assert get_peak_components(on_host, "optimizer") == get_peak_components(on_gpu, "optimizer")


def test_chunked_loss_never_allocates_all_logits() -> None:
    whole, chunked = (
        rehearse_stage(build_small_plan(ss.Layout.ddp(), seq_len=4096, loss=loss))
        for loss in ("full", "chunked")
    )
    assert (
        get_peak_components(chunked, "forward")["logits"]
        < get_peak_components(whole, "forward")["logits"] / 2.5
    )
    assert sum(get_peak_components(chunked, "backward").get(name, 0) for name in TENSOR_COMPONENTS) < sum(
        get_peak_components(whole, "backward").get(name, 0) for name in TENSOR_COMPONENTS
    )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"optimizer": "paged_adamw"}, r"Recipe\.optimizer is 'paged_adamw'.*driver moves pages"),
        ({"kernels": "liger"}, r"Recipe\.kernels is 'liger'.*kernels need real tensors"),
        ({"kernels": "compiled"}, r"Recipe\.kernels is 'compiled'.*kernels need real tensors"),
        ({"attention": "flash"}, r"Recipe\.attention is 'flash'.*run on a GPU only"),
        ({"loss": "fused"}, r"Recipe\.loss is 'fused'.*runs on a GPU only"),
    ],
)
def test_recipes_that_fake_tensors_do_not_support_are_rejected(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        rehearse_stage(build_small_plan(ss.Layout.ddp(), **change))


def test_chunked_loss_in_pipeline_stages_is_rejected() -> None:
    plan = build_small_plan(ss.Layout.fsdp2(pp=2), global_batch_size=8, loss="chunked")
    with pytest.raises(ValueError, match=r"Recipe\.loss is 'chunked'"):
        fsdp2.rehearse(plan, lambda words, fraction: None)
