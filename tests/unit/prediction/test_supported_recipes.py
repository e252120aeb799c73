"""Tests of every recipe option on every layout: predicted, or rejected with a fix that works."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from tests.requirements import sample

import shardscope as ss
from shardscope.core.errors import FieldError
from shardscope.core.recipe import CHOICES, OPEN_CHOICES
from shardscope.memory.report import COMPONENTS
from shardscope.prediction.support import SUPPORT

LAYOUTS = {
    "ddp": ss.Layout.ddp(),
    "fsdp2": ss.Layout.fsdp2(),
    "zero": ss.Layout.zero(),
    "megatron": ss.Layout.megatron(),
}
MODELS = ("llama-3.1-8b", "gpt2", "mixtral-8x7b", "gemma-2-9b")
CLUSTERS = {name: ss.Cluster.parse(name) for name in ("8xh100-sxm-80gb", "2xcpu")}
CHANGES: list[dict[str, Any]] = [
    *({field: value} for field, values in {**CHOICES, **OPEN_CHOICES}.items() for value in values),
    {"method": "lora", "quantization": "nf4"},
    {"method": "lora", "quantization": "int8"},
    {"method": "lora", "lora_dropout": 0.1},
    {"method": "lora", "use_dora": True},
    {"recompute": "full", "recompute_interval": 2},
    {"recompute": "offload", "recompute_interval": 3},
    {"dropout": 0.1},
    {"packing": True},
    {"packing": True, "attention": "flash"},
    {"expert_imbalance": 1.5},
    {"expert_capacity_factor": 1.25},
]


@sample(8)
@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_recipe_option_is_predicted_or_rejected_with_a_fix(
    layout: str, model: str, cluster: str
) -> None:
    for change in CHANGES:
        if change.get("quantization") and "method" not in change:
            continue
        recipe = replace(ss.Recipe(seq_len=512), **change)
        try:
            plan = ss.Plan(ss.models[model], CLUSTERS[cluster], recipe, LAYOUTS[layout])
        except FieldError as error:
            owner, _, field = error.field.partition(".")
            assert owner in ("Recipe", "Layout"), change
            assert field.split()[0] in {*change, "stage", "tp", "ep", "optimizer"}, (change, str(error))
            assert error.fix
            continue
        report = plan.memory()
        for stage, moment in product(report.by_stage, range(3)):
            terms = stage.phases[moment].components
            assert all(type(value) is int and value >= 0 for value in terms.values()), (change, dict(terms))
        for name in COMPONENTS:
            assert report.explain(name)
        assert ss.Plan.from_json(plan.to_json()).memory().peak_bytes == report.peak_bytes


def test_the_fix_of_an_unsupported_option_works() -> None:
    for layout in LAYOUTS.values():
        for field, value in ((f, v) for f in SUPPORT for v in (CHOICES.get(f) or OPEN_CHOICES[f])):
            if field in ("quantization", "method"):
                continue
            recipe = replace(ss.Recipe(), **{field: value})
            try:
                ss.Plan(ss.models["llama-3.1-8b"], CLUSTERS["8xh100-sxm-80gb"], recipe, layout)
            except FieldError as error:
                fixed_field, _, suggested = error.fix.partition("=")
                change = {fixed_field: None if suggested == "None" else suggested.strip("'\"")}
                fixed_recipe = replace(recipe, **change)  # type: ignore[arg-type]
                ss.Plan(ss.models["llama-3.1-8b"], CLUSTERS["8xh100-sxm-80gb"], fixed_recipe, layout)


@pytest.mark.parametrize(
    ("layout", "change", "suggested"),
    [
        (ss.Layout.ddp(), {"precision": "fp8-mixed"}, "bf16-mixed"),
        (ss.Layout.zero(), {"optimizer": "muon"}, "adamw"),
        (ss.Layout.fsdp2(), {"optimizer": "adafactor"}, "adamw"),
    ],
    ids=str,
)
def test_the_suggested_value_is_of_the_same_kind_not_of_the_most_similar_name(
    layout: ss.Layout, change: dict[str, Any], suggested: str
) -> None:
    """For fp8 it was fp16, about which the preflight then warns."""
    recipe = replace(ss.Recipe(), **change)
    with pytest.raises(FieldError) as refusal:
        ss.Plan(ss.models["llama-3.1-8b"], CLUSTERS["8xh100-sxm-80gb"], recipe, layout)
    assert list(refusal.value.changes.values()) == [suggested]


@pytest.mark.parametrize(
    ("model", "layout", "change", "reason"),
    [
        ("glm-4-9b", ss.Layout.ddp(), {}, "glm): a mask of documents is known to work with llama"),
        ("gemma-2-9b", ss.Layout.ddp(), {}, "gemma2"),
        ("llama-3.1-8b", ss.Layout.ddp(), {"attention": "eager"}, "attention='eager'"),
        ("mistral-7b", ss.Layout.ddp(), {"seq_len": 4096}, "seq_len=4096 and the sliding window of"),
        ("llama-3.1-8b", ss.Layout.fsdp2(pp=2), {}, "pp=2: stages pass on hidden states"),
        ("llama-3.1-8b", ss.Layout.fsdp2(cp=2), {}, "cp=2: ring attention takes no mask"),
        ("llama-3.1-8b", ss.Layout.fsdp2(tp=2), {}, "tp=2"),
        ("llama-3.1-8b", ss.Layout.ddp(), {"kernels": "compiled"}, "kernels='compiled'"),
        ("llama-3.1-8b", ss.Layout.ddp(), {"recompute": "offload"}, "recompute='offload'"),
        ("llama-3.1-8b", ss.Layout.megatron(), {}, "Megatron"),
    ],
)
def test_packing_without_a_mask_that_attention_takes_is_rejected(
    model: str, layout: ss.Layout, change: dict[str, Any], reason: str
) -> None:
    recipe = replace(ss.Recipe(seq_len=512, global_batch_size=64), **change)
    cluster = CLUSTERS["8xh100-sxm-80gb"]
    assert ss.Plan(ss.models[model], cluster, recipe, layout)
    with pytest.raises(FieldError) as caught:
        ss.Plan(ss.models[model], cluster, replace(recipe, packing=True), layout)
    error = caught.value
    assert (error.field, error.fix) == ("Recipe.packing", "packing=False")
    assert str(error).startswith("Recipe.packing is True; allowed: False with") and reason in str(error)


def test_a_mask_of_documents_is_in_the_activations_and_the_time() -> None:
    """One mask for all layers, in rows of a multiple of 8; attention multiplies all keys, not half."""
    recipe = ss.Recipe(seq_len=1020, micro_batch_size=2, global_batch_size=64, precision="bf16")
    for cluster in CLUSTERS.values():
        unpacked, packed, longer = (
            ss.Plan(ss.models["gpt2"], cluster, one, ss.Layout.fsdp2())
            for one in (recipe, replace(recipe, packing=True), replace(recipe, packing=True, seq_len=1024))
        )
        # GPT-2 has no grouped queries, so that keys and values are the same, and no rotary tables.
        mask, positions = 2 * 1020 * 1024 * 2, 8 * 2 * 1020
        before, after = (plan.memory().at("forward")["activations"] for plan in (unpacked, packed))
        assert after - before == mask + positions
        assert longer.memory().peak_bytes > packed.memory().peak_bytes
    steps = [
        ss.Plan(ss.models["gpt2"], CLUSTERS["8xh100-sxm-80gb"], one, ss.Layout.fsdp2()).step()
        for one in (recipe, replace(recipe, packing=True))
    ]
    assert steps[1].parts["attention"] == pytest.approx(2 * steps[0].parts["attention"])
    assert steps[1].hardware_flops > steps[0].hardware_flops
    assert "all scores" in steps[1].explain("attention")
    assert "causal scores" in steps[0].explain("attention")


def test_engines_reject_options_they_do_not_train() -> None:
    from shardscope.frameworks.registry import why_not_trained

    two = ss.Cluster.parse("2xcpu")
    for change, text in (
        ({"optimizer": "adamw_8bit"}, "Recipe.optimizer"),
        ({"attention": "eager"}, "Recipe.attention"),
    ):
        plan = ss.Plan(ss.Architecture.of_size("2m"), two, ss.Recipe(seq_len=64, **change), ss.Layout.ddp())  # type: ignore[arg-type]
        why = why_not_trained(plan)
        assert why is not None
        assert text in why
    ok = ss.Plan(ss.Architecture.of_size("2m"), two, ss.Recipe(seq_len=64), ss.Layout.ddp())
    assert why_not_trained(ok) is None


@pytest.mark.parametrize(
    ("layout", "model", "change"),
    [
        (ss.Layout.zero(), "llama-3.1-8b", {}),
        (ss.Layout.zero(stage=2), "llama-3.1-8b", {}),
        (ss.Layout.fsdp2(offload="cpu"), "llama-3.1-8b", {}),
        (ss.Layout.fsdp2(tp=2), "llama-3.1-8b", {}),
        (ss.Layout.ddp(), "gpt2", {}),
        (ss.Layout.ddp(), "mixtral-8x7b", {}),
        (ss.Layout.ddp(), "llama-3.1-8b", {"lora_dropout": 0.1}),
        (ss.Layout.ddp(), "llama-3.1-8b", {"recompute": "selective"}),
        (ss.Layout.ddp(), "llama-3.1-8b", {"recompute": "offload"}),
        (ss.Layout.ddp(), "llama-3.1-8b", {"kernels": "liger"}),
        (ss.Layout.ddp(), "llama-3.1-8b", {"kernels": "compiled"}),
        (ss.Layout.ddp(), "llama-3.1-8b", {"attention": "eager"}),
    ],
)
def test_dora_is_rejected_where_it_cannot_be_predicted(
    layout: ss.Layout, model: str, change: dict[str, Any]
) -> None:
    recipe = ss.Recipe(method="lora", seq_len=512, **change)
    plan = ss.Plan(ss.models[model], CLUSTERS["8xh100-sxm-80gb"], recipe, layout)
    with pytest.raises(FieldError, match="use_dora=False") as caught:
        replace(plan, recipe=replace(recipe, use_dora=True))
    assert caught.value.field == "Recipe.use_dora"
