"""megatron-core's options of gradients, optimizer and loss: bytes by hand, a rehearsal, invalid options."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from random_plans import LLAMA, MOE
from tests.requirements import few, thorough

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
    full_recipe = ss.Recipe(**{"seq_len": 512, "global_batch_size": 64, **(recipe or {})})
    return Plan(arch, EIGHT, full_recipe, ss.Layout.megatron(**layout))


def read_bytes(example: Plan, phase: Any, name: str) -> int:
    return example.memory().at(phase)[name]


def count_weights(example: Plan) -> int:
    return read_bytes(example, "rest", "parameters") // 2


@pytest.mark.parametrize(
    ("precision", "in_fp32", "width"),
    [
        ("bf16-mixed", None, 4),
        ("bf16-mixed", False, 2),
        ("bf16-mixed", True, 4),
        ("fp16-mixed", None, 2),
        ("fp16-mixed", True, 4),
        ("fp8-mixed", None, 4),
    ],
)
def test_gradients_have_the_configured_dtype(precision: str, in_fp32: bool | None, width: int) -> None:
    example = plan(recipe={"precision": precision}, grad_reduce_in_fp32=in_fp32)
    num_weights = count_weights(plan())
    assert read_bytes(example, "rest", "gradients") == width * num_weights
    # Those in half precision are copied to fp32 for the update, of this rank's share.
    working = read_bytes(example, "optimizer", "optimizer") - read_bytes(example, "rest", "optimizer")
    assert working == (4 * num_weights // 8 if width == 2 else 0)


@pytest.mark.parametrize(
    ("options", "state_bytes", "copied"),
    [
        ({}, 12, 0),
        (AWARE, 2 + 8, 0),
        (IN_BF16, 2 + 4, 8),
        ({**AWARE, "exp_avg_dtype": "bf16"}, 2 + 6, 4),
        ({**AWARE, "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp16"}, 2 + 3, 8),
    ],
)
def test_bytes_of_the_precision_aware_optimizer(
    options: dict[str, Any], state_bytes: int, copied: int
) -> None:
    example = plan(grad_reduce_in_fp32=False if options else None, **options)
    share = count_weights(example) // 8
    assert read_bytes(example, "rest", "optimizer") == state_bytes * share
    assert read_bytes(example, "optimizer", "optimizer") == (state_bytes + copied) * share
    text = example.memory().worst_stage.at("optimizer").terms["optimizer"].explain()
    assert ("lower 16 bits" in text) == bool(options)
    assert ("fp32 copies of moments" in text) == bool(copied)


def test_fp16_weights_have_fp32_main_weights() -> None:
    example = plan(recipe={"precision": "fp16-mixed"}, **IN_BF16)
    assert read_bytes(example, "rest", "optimizer") == 8 * count_weights(example) // 8


def test_experts_have_their_own_optimizer_which_steps_afterwards() -> None:
    example = plan(MOE, ep=2, **IN_BF16)
    plain = plan(MOE, ep=2)
    states = read_bytes(plain, "rest", "optimizer") // 12
    working = read_bytes(example, "optimizer", "optimizer") - read_bytes(example, "rest", "optimizer")
    assert 8 * states // 2 <= working < 8 * states
    whole = plan(MOE, **IN_BF16)
    assert read_bytes(whole, "optimizer", "optimizer") == 14 * (
        read_bytes(plan(MOE), "rest", "optimizer") // 12
    )


@pytest.mark.parametrize(("impl", "width"), [("native", 6), ("te", 2)])
def test_transformer_engine_loss_overwrites_the_logits(impl: str, width: int) -> None:
    example = plan(recipe={"loss": "fused"}, tp=2, cross_entropy_fusion_impl=impl)
    rows = compute_padded_vocab_size(LLAMA.vocab_size, 2) // 2
    peak = max(m.components["logits"] for m in example.memory().worst_stage.phases)
    assert peak >= width * 512 * rows
    assert (peak == 2 * 512 * rows) == (impl == "te")
    # Another loss has no such kernel.
    peaks = [plan(cross_entropy_fusion_impl=name).memory().peak_bytes for name in ("native", "te")]
    assert peaks[0] == peaks[1]


def test_batches_of_plans_have_the_same_bytes() -> None:
    options = [{"grad_reduce_in_fp32": False}, IN_BF16, {**IN_BF16, "grad_reduce_in_fp32": False}]
    plans = [
        plan(MOE, tp=tp, ep=ep, **full_recipe)
        for full_recipe in options
        for tp, ep in ((1, 1), (2, 1), (1, 2), (2, 4))
    ]
    assert compute_peaks(plans).tolist() == [one.memory().peak_bytes for one in plans]


def test_options_round_trip_through_json() -> None:
    options = {"cross_entropy_fusion_impl": "te", "grad_reduce_in_fp32": False, **IN_BF16}
    example = plan(recipe={"loss": "fused"}, **options)
    assert Plan.from_json(example.to_json()) == example
    data = example.to_dict()
    for name in options:
        del data["layout"][name]
    assert Plan.from_dict(data).layout == ss.Layout.megatron()


@pytest.mark.parametrize("split", few([True, False], [False]))
def test_rehearsal_with_bf16_gradients_matches_the_prediction(split: bool) -> None:
    example = plan(
        replace(ss.Architecture.of_size("60m"), num_hidden_layers=2),
        grad_reduce_in_fp32=False,
        distributed_optimizer=split,
    )
    (stage,) = rehearse(example, lambda text, fraction: None)
    rehearsed, predicted = (
        stage.peak.components,
        example.memory().worst_stage.at(stage.peak.phase).components,
    )
    assert sum(rehearsed.values()) == pytest.approx(
        sum(predicted[name] for name in TENSOR_COMPONENTS), rel=0.01
    )
    assert rehearsed["gradients"] == pytest.approx(predicted["gradients"], rel=1e-3)
    assert rehearsed["optimizer"] == pytest.approx(predicted["optimizer"], rel=0.02)


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
def test_options_that_megatron_asserts_against_raise(
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
def test_options_of_transformer_engine_cannot_be_rehearsed(
    recipe: dict[str, Any], options: dict[str, Any], field: str
) -> None:
    with pytest.raises(ValueError, match=field):
        plan(recipe=recipe, **options).rehearse()
