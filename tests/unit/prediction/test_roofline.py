"""Tests of a plan's roofline: its operators are the FLOPs and seconds that ``plan.step()`` counts."""

from __future__ import annotations

import pytest

import shardscope as ss
from shardscope.frameworks.registry import frameworks
from shardscope.memory.activations.forward import find_modules
from shardscope.prediction.roofline import change_batch, compute_roofline
from shardscope.timing.calibration.selection import select_rates
from shardscope.timing.matmul import count_attention_flops_per_token, count_layer_products
from shardscope.timing.stages import prepare_layers

LLAMA, MIXTRAL = ss.models["llama-3.1-8b"], ss.models["mixtral-8x7b"]
H100 = ss.Cluster.parse("8xh100-sxm-80gb")


def build_plan(layout: ss.Layout, model: ss.Architecture = LLAMA, **recipe: object) -> ss.Plan:
    options = {"global_batch_size": 16, **recipe}
    return ss.Plan(model, H100, ss.Recipe(**options), layout)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "plan",
    [
        build_plan(ss.Layout.fsdp2()),
        build_plan(ss.Layout.megatron(tp=4), micro_batch_size=2),
        build_plan(ss.Layout.fsdp2(), attention="eager"),
        build_plan(ss.Layout.megatron(ep=8), MIXTRAL),
    ],
    ids=["fsdp2", "tp", "eager", "experts"],
)
def test_operators_sum_to_the_layers_of_the_step_model(plan: ss.Plan) -> None:
    shown = compute_roofline(plan)
    rates = select_rates(plan.cluster)
    work = prepare_layers(plan, find_modules(plan), rates, frameworks[plan.layout.framework].timing_model())
    moe, degrees = shown.has_experts, plan.degrees
    products = count_layer_products(plan.architecture, moe, degrees.tp, degrees.ep, work.expert_tp)
    matmuls = [one for one in shown.operators if one.kind == "matmul"]
    assert sum(one.flops for one in matmuls) == pytest.approx(2 * work.tokens * products.weights)
    moved = 2 * (products.weights + work.tokens * products.edges)
    assert sum(one.num_bytes for one in matmuls) == pytest.approx(moved)
    experts = [one for one in shown.operators if one.kind == "expert matmul"]
    if moe:
        expected = 2 * work.count_routed_tokens() * products.expert_weights
        assert sum(one.flops for one in experts) == pytest.approx(expected)
    (attention,) = [one for one in shown.operators if one.kind == "attention"]
    if plan.recipe.attention != "eager":
        expected = work.tokens * count_attention_flops_per_token(plan.architecture, work.modules) / degrees.tp
        assert attention.flops == pytest.approx(expected)
    layer = work.compute_layer(moe)
    total = sum(one.seconds for one in shown.operators) + shown.rest_seconds
    assert total == pytest.approx(layer.forward)
    assert attention.seconds == layer.forward_attention
    # No operator is above the roofline.
    for one in shown.operators:
        assert one.flops / one.seconds <= shown.compute_attainable(one) * 1.001


def test_more_tokens_raise_the_intensity_of_matmuls_until_weights_count_for_nothing() -> None:
    plan = build_plan(ss.Layout.fsdp2())
    by_size = [compute_roofline(change_batch(plan, size, 128)) for size in (1, 4, 16)]
    intensities = [shown.operators[0].flops / shown.operators[0].num_bytes for shown in by_size]
    assert intensities == sorted(intensities)
    assert intensities[0] < by_size[0].find_ridge("bf16") < intensities[2]
    assert change_batch(plan, 4, 512).num_micro_batches == plan.num_micro_batches
    with pytest.raises(ValueError, match="seq_len"):
        change_batch(build_plan(ss.Layout.ddp(), ss.models["gpt2"], seq_len=1024), 1, 2048)


def test_eight_bit_matmuls_have_a_roof_of_their_own() -> None:
    shown = compute_roofline(build_plan(ss.Layout.megatron(), precision="fp8-mixed"))
    assert list(shown.peaks) == ["fp8", "bf16"]
    assert {one.precision for one in shown.operators if one.kind == "attention"} == {"bf16"}


@pytest.mark.parametrize(
    ("layout", "precision", "expected"),
    [
        (ss.Layout.ddp(), "bf16-mixed", "fp32"),
        (ss.Layout.fsdp2(), "bf16-mixed", "bf16"),
        (ss.Layout.fsdp2(), "fp8-mixed", "bf16"),
        (ss.Layout.megatron(ep=8), "fp8-mixed", "fp8"),
    ],
)
def test_experts_are_bounded_by_the_peak_of_their_own_dtype(
    layout: ss.Layout, precision: str, expected: str
) -> None:
    """Autocast leaves grouped matmuls in fp32, and torchao's float8 converts Linears only."""
    shown = compute_roofline(build_plan(layout, MIXTRAL, precision=precision))
    experts = [one for one in shown.operators if one.kind == "expert matmul"]
    assert {one.precision for one in experts} == {expected}
    assert shown.peaks[expected] == H100.gpu.peak_flops[expected]
    for one in experts:
        assert one.flops / one.seconds <= shown.compute_attainable(one) * 1.001
