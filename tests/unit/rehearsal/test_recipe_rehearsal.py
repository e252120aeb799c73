"""Rehearsals of recipes beyond AdamW over whole logits: what is played, what is refused, how close it is."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tests.accuracy.recipe_sampling import FRAMEWORKS, SEEDS, plans, stored_file
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
"""The goal, and reached."""
WORST = 0.018
"""The worst error that is reached; the goal is 0.03."""


def waits_on_the_device(row: Rehearsed) -> bool:
    """Copies of shards on the host: what was reduced waits on the GPU for the last group (torch's
    ``AllReduceState``), which no formula counts yet."""
    layout: Any = row.plan.layout
    return bool(getattr(layout, "offload", None) and row.plan.degrees.replicate > 1)


@pytest.mark.parametrize("sample", SEEDS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_predictions_agree_with_both_samples(framework: str, sample: str) -> None:
    rows, refused = read_rehearsals([stored_file(framework, sample)])
    assert not refused and len(rows) >= 25
    sampled = plans(framework, SEEDS[sample], len(rows))
    stored = {row.name.partition(":")[2]: row.plan for row in rows}
    # CPU ranks share the memory of the machine on which they were drawn.
    assert all(is_same(stored[str(index)], plan) for index, plan in enumerate(sampled))
    rows = [row for row in rows if framework == "ddp" or not waits_on_the_device(row)]
    close = sum(abs(row.error) <= 0.01 for row in rows) / len(rows)
    worst = max(rows, key=lambda row: abs(row.error))
    assert close >= WITHIN_ONE_PERCENT, close
    assert abs(worst.error) <= WORST, in_words(worst)


@pytest.mark.parametrize("sample", SEEDS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_offloaded_tensors_in_host_memory_are_predicted(framework: str, sample: str) -> None:
    """Offloaded activations, and autocast's copies of weights among them."""
    compared = 0
    for line in stored_file(framework, sample).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        plan = plans(framework, SEEDS[sample], int(row["name"]) + 1)[-1]
        if plan.recipe.recompute == "offload":
            rehearsed = max(stage["host_bytes"] for stage in row["stages"])
            assert plan.memory().host_bytes == pytest.approx(rehearsed, rel=0.025), row["name"]
            compared += 1
    assert compared >= 5


def test_fsdp2_gathers_packed_weights_beside_adapters_in_fp32() -> None:
    """The sample's plans of FSDP2 over NF4, in bf16-mixed: 13 of 13 within 0.5 % when first seen."""
    rows, refused = read_rehearsals([STORED / "fsdp2-nf4-mixed.jsonl"])
    assert not refused and len(rows) == 13
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


def small(layout: Any, cluster: ss.Cluster = EIGHT, **recipe: Any) -> Plan:
    sizes = {"seq_len": 128, "global_batch_size": cluster.num_gpus, **recipe}
    return Plan(Architecture.of_size("10m"), cluster, ss.Recipe(**sizes), layout)


def played(plan: Plan) -> RehearsedStage:
    (stage,) = MODULES[plan.layout.framework].rehearse(plan, lambda words, fraction: None)
    found: RehearsedStage = stage
    return found


def at(stage: RehearsedStage, phase: str) -> dict[str, int]:
    moments = [moment.components for moment in stage.moments if moment.phase == phase]
    return max(moments, key=lambda parts: sum(parts.values()))


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
def test_an_optimizers_own_code_keeps_what_is_predicted(framework: str, optimizer: str) -> None:
    plan = small(getattr(ss.Layout, framework)(), optimizer=optimizer)
    stage, report = played(plan), plan.memory()
    # A few numbers: step counters, and the fused AdamW that goes beside Muon has one a tensor.
    for phase in ("rest", "optimizer"):
        assert at(stage, phase)["optimizer"] == pytest.approx(
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

    plan = small(getattr(ss.Layout, framework)(), **recipe)
    tables = dict(functional.name2qmap)
    assert at(played(plan), "rest")["parameters"] == pytest.approx(
        plan.memory().at("rest")["parameters"], abs=20_000
    )
    # What bitsandbytes keeps for the process is as real as before.
    assert functional.name2qmap == tables
    packed = functional.quantize_4bit(torch.ones(4096), quant_type="nf4")[0]
    assert type(packed) is torch.Tensor


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_offloaded_activations_are_in_host_memory_until_backward(framework: str) -> None:
    layout = getattr(ss.Layout, framework)()
    kept, away = (played(small(layout, precision="bf16", recompute=one)) for one in ("none", "offload"))
    assert kept.host_bytes == 0 < away.host_bytes
    assert at(away, "forward")["activations"] < at(kept, "forward")["activations"] / 2
    assert "activations" not in at(away, "rest")
    assert at(away, "optimizer") == at(kept, "optimizer")


def test_chunked_loss_never_allocates_all_logits() -> None:
    whole, chunked = (played(small(ss.Layout.ddp(), seq_len=4096, loss=loss)) for loss in ("full", "chunked"))
    assert at(chunked, "forward")["logits"] < at(whole, "forward")["logits"] / 2.5
    assert sum(at(chunked, "backward").get(name, 0) for name in TENSOR_COMPONENTS) < sum(
        at(whole, "backward").get(name, 0) for name in TENSOR_COMPONENTS
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"optimizer": "paged_adamw"}, r"Recipe\.optimizer is 'paged_adamw'.*driver moves pages"),
        ({"kernels": "liger"}, r"Recipe\.kernels is 'liger'.*kernels need real tensors"),
        ({"kernels": "compiled"}, r"Recipe\.kernels is 'compiled'.*kernels need real tensors"),
        ({"attention": "flash"}, r"Recipe\.attention is 'flash'.*run on a GPU only"),
        ({"loss": "fused"}, r"Recipe\.loss is 'fused'.*runs on a GPU only"),
    ],
)
def test_recipes_that_fake_tensors_do_not_support_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        played(small(ss.Layout.ddp(), **change))


def test_pipeline_stages_do_not_support_chunked_loss() -> None:
    plan = small(ss.Layout.fsdp2(pp=2), global_batch_size=8, loss="chunked")
    with pytest.raises(ValueError, match=r"Recipe\.loss is 'chunked'"):
        fsdp2.rehearse(plan, lambda words, fraction: None)
