"""Tests of every recipe option on every layout: predicted, or rejected with a fix that works."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

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
    {"recompute": "full", "recompute_interval": 2},
    {"recompute": "offload", "recompute_interval": 3},
    {"dropout": 0.1},
    {"packing": True},
    {"packing": True, "attention": "flash"},
    {"expert_imbalance": 1.5},
    {"expert_capacity_factor": 1.25},
]


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
