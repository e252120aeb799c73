"""Megatron-core's options of gradients, optimizer and loss: bytes by hand, its own code, what it asserts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from planning import LLAMA, MOE
from tests.needs import few, thorough

import shardscope as ss
from shardscope.core.plan import Plan
from shardscope.frameworks.megatron.core_config import compute_padded_vocab_size
from shardscope.frameworks.megatron.rehearsal.rehearse import rehearse
from shardscope.prediction.batch.memory import compute_peaks
from shardscope.rehearsal.result import TENSOR_COMPONENTS

EIGHT = ss.Cluster.parse("8xh100-sxm-80gb")
AWARE = {"use_precision_aware_optimizer": True}
IN_BF16 = {**AWARE, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}


def plan(arch: Any = LLAMA, recipe: dict[str, Any] | None = None, **layout: Any) -> Plan:
    chosen = ss.Recipe(**{"seq_len": 512, "global_batch_size": 64, **(recipe or {})})
    return Plan(arch, EIGHT, chosen, ss.Layout.megatron(**layout))


def at(a_plan: Plan, phase: Any, name: str) -> int:
    return a_plan.memory().at(phase)[name]


def weights(a_plan: Plan) -> int:
    return at(a_plan, "rest", "parameters") // 2


@pytest.mark.parametrize(
    ("precision", "chosen", "each"),
    [
        ("bf16-mixed", None, 4),
        ("bf16-mixed", False, 2),
        ("bf16-mixed", True, 4),
        ("fp16-mixed", None, 2),
        ("fp16-mixed", True, 4),
        ("fp8-mixed", None, 4),
    ],
)
def test_gradients_are_in_the_type_that_was_chosen(precision: str, chosen: bool | None, each: int) -> None:
    a_plan = plan(recipe={"precision": precision}, grad_reduce_in_fp32=chosen)
    numbers = weights(plan())
    assert at(a_plan, "rest", "gradients") == each * numbers
    # Those in half precision are copied to fp32 for the update, of this rank's share.
    more = at(a_plan, "optimizer", "optimizer") - at(a_plan, "rest", "optimizer")
    assert more == (4 * numbers // 8 if each == 2 else 0)


@pytest.mark.parametrize(
    ("options", "kept", "copied"),
    [
        ({}, 12, 0),
        (AWARE, 2 + 8, 0),
        (IN_BF16, 2 + 4, 8),
        ({**AWARE, "exp_avg_dtype": "bf16"}, 2 + 6, 4),
        ({**AWARE, "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp16"}, 2 + 3, 8),
    ],
)
def test_what_the_precision_aware_optimizer_keeps_and_copies(
    options: dict[str, Any], kept: int, copied: int
) -> None:
    a_plan = plan(grad_reduce_in_fp32=False if options else None, **options)
    share = weights(a_plan) // 8
    assert at(a_plan, "rest", "optimizer") == kept * share
    assert at(a_plan, "optimizer", "optimizer") == (kept + copied) * share
    words = a_plan.memory().worst_stage.at("optimizer").terms["optimizer"].explain()
    assert ("lower 16 bits" in words) == bool(options)
    assert ("fp32 copies of moments" in words) == bool(copied)


def test_fp16_weights_have_whole_main_weights() -> None:
    a_plan = plan(recipe={"precision": "fp16-mixed"}, **IN_BF16)
    assert at(a_plan, "rest", "optimizer") == 8 * weights(a_plan) // 8


def test_experts_have_an_optimizer_of_their_own_that_steps_after() -> None:
    a_plan = plan(MOE, ep=2, **IN_BF16)
    plain = plan(MOE, ep=2)
    states = at(plain, "rest", "optimizer") // 12
    more = at(a_plan, "optimizer", "optimizer") - at(a_plan, "rest", "optimizer")
    assert 8 * states // 2 <= more < 8 * states
    whole = plan(MOE, **IN_BF16)
    assert at(whole, "optimizer", "optimizer") == 14 * (at(plan(MOE), "rest", "optimizer") // 12)


@pytest.mark.parametrize(("impl", "each"), [("native", 6), ("te", 2)])
def test_transformer_engines_loss_writes_its_gradient_over_the_logits(impl: str, each: int) -> None:
    a_plan = plan(recipe={"loss": "fused"}, tp=2, cross_entropy_fusion_impl=impl)
    rows = compute_padded_vocab_size(LLAMA.vocab_size, 2) // 2
    peak = max(m.components["logits"] for m in a_plan.memory().worst_stage.phases)
    assert peak >= each * 512 * rows
    assert (peak == 2 * 512 * rows) == (impl == "te")
    # Another loss has no such kernel.
    same = [plan(cross_entropy_fusion_impl=name).memory().peak_bytes for name in ("native", "te")]
    assert same[0] == same[1]


def test_arrays_of_plans_give_the_same_bytes() -> None:
    options = [{"grad_reduce_in_fp32": False}, IN_BF16, {**IN_BF16, "grad_reduce_in_fp32": False}]
    several = [
        plan(MOE, tp=tp, ep=ep, **chosen) for chosen in options for tp, ep in ((1, 1), (2, 1), (1, 2), (2, 4))
    ]
    assert compute_peaks(several).tolist() == [one.memory().peak_bytes for one in several]


def test_a_plan_and_its_json_are_the_same() -> None:
    options = {"cross_entropy_fusion_impl": "te", "grad_reduce_in_fp32": False, **IN_BF16}
    a_plan = plan(recipe={"loss": "fused"}, **options)
    assert Plan.from_json(a_plan.to_json()) == a_plan
    older = a_plan.to_dict()
    for name in options:
        del older["layout"][name]
    assert Plan.from_dict(older).layout == ss.Layout.megatron()


@pytest.mark.parametrize("split", few([True, False], [False]))
def test_megatrons_own_code_with_gradients_in_bf16(split: bool) -> None:
    a_plan = plan(
        replace(ss.Architecture.of_size("60m"), num_hidden_layers=2),
        grad_reduce_in_fp32=False,
        distributed_optimizer=split,
    )
    (stage,) = rehearse(a_plan, lambda words, fraction: None)
    seen, found = stage.peak.components, a_plan.memory().worst_stage.at(stage.peak.phase).components
    assert sum(seen.values()) == pytest.approx(sum(found[name] for name in TENSOR_COMPONENTS), rel=0.01)
    assert seen["gradients"] == pytest.approx(found["gradients"], rel=1e-3)
    assert seen["optimizer"] == pytest.approx(found["optimizer"], rel=0.02)


@pytest.mark.parametrize(
    ("recipe", "options", "field"),
    [
        ({}, {"grad_reduce_in_fp32": "no"}, "Layout.grad_reduce_in_fp32"),
        ({}, {"exp_avg_dtype": "bf16"}, "Layout.exp_avg_dtype"),
        ({}, {**AWARE, "exp_avg_sq_dtype": "fp4"}, "Layout.exp_avg_sq_dtype"),
        ({}, {**AWARE, "distributed_optimizer": False}, "Layout.use_precision_aware_optimizer"),
        ({}, {"cross_entropy_fusion_impl": "liger"}, "Layout.cross_entropy_fusion_impl"),
        ({"precision": "fp8-mixed"}, AWARE, "Recipe.precision"),
        ({"precision": "fp32"}, AWARE, "Recipe.precision"),
    ],
)
def test_what_megatron_asserts_is_refused(
    recipe: dict[str, Any], options: dict[str, Any], field: str
) -> None:
    with pytest.raises(ValueError, match=field):
        plan(recipe=recipe, **options)


@thorough()
@pytest.mark.parametrize(
    ("recipe", "options", "field"),
    [
        ({}, AWARE, "use_precision_aware"),
        ({"loss": "fused"}, {"cross_entropy_fusion_impl": "te"}, "fusion_impl"),
    ],
)
def test_what_needs_transformer_engine_is_not_rehearsed(
    recipe: dict[str, Any], options: dict[str, Any], field: str
) -> None:
    with pytest.raises(ValueError, match=field):
        plan(recipe=recipe, **options).rehearse()
