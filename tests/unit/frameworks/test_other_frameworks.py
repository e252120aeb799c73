"""Errors of plans that cannot be trained name the frameworks that can."""

from __future__ import annotations

from typing import Any

import pytest

import shardscope as ss
from shardscope.core.errors import FieldError
from shardscope.core.serialization import replace_fields
from shardscope.frameworks.registry import check_trained, find_other_layouts, why_not_trained

CLUSTER = ss.Cluster.parse("4xh100-sxm-80gb")


@pytest.mark.parametrize(
    ("layout", "default"),
    [
        (ss.Layout.ddp(), {"attention": "sdpa"}),
        (ss.Layout.fsdp2(pp=2), {"attention": "sdpa"}),
        (ss.Layout.megatron(), {"kernels": "megatron"}),
    ],
)
def test_a_default_that_is_set_by_name_is_trained(layout: Any, default: dict[str, Any]) -> None:
    plan, named = (
        ss.Plan(ss.models["llama-3.1-8b"], CLUSTER, ss.Recipe(**recipe), layout) for recipe in ({}, default)
    )
    assert why_not_trained(named) is None
    assert named.memory().components == plan.memory().components


@pytest.mark.parametrize(
    ("layout", "recipe", "expected"),
    [
        (ss.Layout.zero(), {"optimizer": "lion"}, "or DDP or FSDP2, which train it"),
        (ss.Layout.megatron(cp=2), {}, "Nearest fix: layout=Layout.fsdp2(cp=2)."),
        (ss.Layout.ddp(), {"attention": "flash"}, "attention=None."),
    ],
)
def test_the_error_names_the_frameworks_that_train_the_plan(
    layout: Any, recipe: dict[str, Any], expected: str
) -> None:
    plan = ss.Plan(ss.models["llama-3.1-8b"], CLUSTER, ss.Recipe(**recipe), layout)
    message = why_not_trained(plan)
    assert message is not None and expected in message
    for other in find_other_layouts(plan):
        assert why_not_trained(ss.Plan(plan.architecture, CLUSTER, plan.recipe, other)) is None


@pytest.mark.parametrize(
    ("layout", "recipe", "needed"),
    [
        # The fix of the first limit alone, pp=1, would be refused for vpp.
        (ss.Layout.fsdp2(pp=2, vpp=2), {"method": "lora"}, {"Layout.pp": 1, "Layout.vpp": 1}),
        # tp=1 leaves more data-parallel ranks than the batch has sequences.
        (
            ss.Layout.fsdp2(tp=2),
            {"method": "lora", "global_batch_size": 2},
            {"Layout.tp": 1, "Recipe.global_batch_size": 4},
        ),
        # With tp=1 adapters still cannot be split into stages.
        (ss.Layout.fsdp2(tp=2, pp=2), {"method": "lora"}, {"Layout.tp": 1, "Layout.pp": 1}),
        (ss.Layout.zero(), {"loss": "chunked"}, {"Recipe.loss": "full"}),
        # FSDP2 has no kernels of Megatron-core, and keeps the sequences sharded.
        (
            ss.Layout.megatron(cp=2),
            {"kernels": "megatron"},
            {"Layout": ss.Layout.fsdp2(), "Layout.cp": 2, "Recipe.kernels": None},
        ),
    ],
)
def test_an_engine_trains_the_plan_with_the_suggested_fix(
    layout: Any, recipe: dict[str, Any], needed: dict[str, Any]
) -> None:
    plan = ss.Plan(ss.models["llama-3.1-8b"], CLUSTER, ss.Recipe(**recipe), layout)
    with pytest.raises(FieldError) as refusal:
        check_trained(plan)
    assert refusal.value.changes == needed
    parts: dict[str, dict[str, Any]] = {"Recipe": {}, "Layout": {}}
    new_layout = needed.get("Layout", plan.layout)
    for name, value in needed.items():
        owner, _, field = name.partition(".")
        if not field:
            continue
        parts[owner][field] = value
        assert f"{field}={value!r}" in str(refusal.value)
    changed = ss.Plan(
        plan.architecture,
        CLUSTER,
        replace_fields(plan.recipe, parts["Recipe"]),
        replace_fields(new_layout, parts["Layout"]),
    )
    check_trained(changed)


@pytest.mark.parametrize(("layout", "method"), [({"tp": 2}, "lora"), ({"pp": 2, "vpp": 2}, "qlora")])
def test_a_missing_package_does_not_change_what_the_fix_trains(
    layout: Any, method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fix was method="full", the only plan that is trained without peft."""
    monkeypatch.setattr("shardscope.frameworks.limits.is_missing", lambda package: True)
    plan = ss.Plan(ss.models["llama-3.1-8b"], CLUSTER, ss.Recipe(method=method), ss.Layout.fsdp2(**layout))
    with pytest.raises(FieldError) as refusal:
        check_trained(plan)
    assert refusal.value.changes == {f"Layout.{name}": 1 for name in layout}
