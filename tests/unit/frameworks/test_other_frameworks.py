"""Errors of plans that cannot be trained name the frameworks that can."""

from __future__ import annotations

from typing import Any

import pytest

import shardscope as ss
from shardscope.frameworks.registry import find_other_layouts, why_not_trained

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
