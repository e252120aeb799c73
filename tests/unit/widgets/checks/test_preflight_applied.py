"""Tests of applying suggested fixes to the Studio's inputs."""

from __future__ import annotations

from typing import Any

import pytest
from tests.requirements import sample

import shardscope as ss
from shardscope_widgets import Studio


@sample(3)
@pytest.mark.parametrize(
    ("model", "layout", "recipe", "name"),
    [
        ("gpt2", ss.Layout.fsdp2(), {"seq_len": 1024}, "width-misses-matrix-units"),
        ("llama-3.1-8b", ss.Layout.fsdp2(), {"seq_len": 1001}, "width-misses-matrix-units"),
        ("llama-3.1-8b", ss.Layout.fsdp2(), {"recompute": "full"}, "recomputation-on"),
        ("llama-3.1-8b", ss.Layout.fsdp2(), {"micro_batch_size": 2}, "recomputation-off"),
        ("llama-3.1-8b", ss.Layout.fsdp2(), {"precision": "fp16-mixed"}, "fp16-though-bf16-is-there"),
        ("llama-3.1-8b", ss.Layout.ddp(), {"recompute": "full"}, "out-of-gpu-memory"),
        ("llama-3.1-8b", ss.Layout.zero(2), {}, "reductions-in-half-precision"),
        ("llama-3.1-8b", ss.Layout.zero(3), {}, "reductions-in-half-precision"),
        ("llama-3.1-8b", ss.Layout.megatron(tp=8), {"recompute": "full"}, "tensor-parallel-over-slow-link"),
    ],
)
def test_applying_a_fix_sets_the_inputs_and_removes_the_finding(
    model: str, layout: ss.Layout, recipe: dict[str, Any], name: str
) -> None:
    studio = Studio()
    plan = ss.Plan(ss.models[model], ss.Cluster.parse("8xa100-sxm-80gb"), ss.Recipe(**recipe), layout)
    (fixable,) = [finding for finding in plan.findings() if finding.name == name]
    assert fixable.plan is not None
    studio.apply(plan)
    assert get_effective_settings(studio.plan) == get_effective_settings(plan)
    studio.apply(fixable.plan)
    assert get_effective_settings(studio.plan) == get_effective_settings(fixable.plan)
    assert name not in [finding.name for finding in studio.plan.findings()]


def test_option_without_an_input_is_shown_in_the_layout_hint() -> None:
    studio = Studio()
    cluster = ss.Cluster.parse("8xa100-sxm-80gb")
    layout = ss.Layout.zero(2, communication_data_type="fp32")
    studio.apply(ss.Plan(ss.models["llama-3.1-8b"], cluster, ss.Recipe(), layout))
    assert studio.plan.layout == layout
    assert "Also set: communication data type fp32" in studio.layout_picker.hint.value


def get_effective_settings(plan: ss.Plan) -> tuple[Any, ...]:
    """Return the resolved settings of a plan: inputs set options explicitly that a layout may leave unset."""
    return plan.architecture, plan.cluster, plan.recipe, plan.degrees, plan.memory().components
