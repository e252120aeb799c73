"""Tests of predictions against DeepSpeed's own MoE layers on fake tensors."""

from __future__ import annotations

from typing import Any

import pytest
from tests.in_process_rehearsal import list_stages
from tests.requirements import few, needs, needs_installed, thorough

needs("torch")
needs("transformers")
pytestmark = [needs_installed("deepspeed"), thorough()]

import shardscope as ss  # noqa: E402
from shardscope.rehearsal.result import TENSOR_COMPONENTS  # noqa: E402

CLOSE = 0.01
MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 16_000,
    "max_position_embeddings": 4096, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
BUCKET = {"reduce_bucket_size": 4_000_000}
PLANS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "zero-1": ({"stage": 1, "ep": 2, **BUCKET}, {}),
    "zero-2, every layer recomputed": ({"stage": 2, "ep": 8, **BUCKET}, {"recompute": "full"}),
    "zero-0 fp32": ({"stage": 0, "ep": 4}, {"precision": "fp32"}),
    "zero-1, three of eight": ({"stage": 1, "ep": 2, **BUCKET}, {"global_batch_size": 8}),
    "zero-2, on the host": ({"stage": 2, "ep": 2, "offload_optimizer": "cpu", **BUCKET}, {}),
}


def build_plan(layout: dict[str, Any], recipe: dict[str, Any], config: dict[str, Any]) -> ss.Plan:
    return ss.Plan(
        ss.Architecture.from_hf({**MIXTRAL, **config}),
        ss.Cluster.parse("8xh100-sxm-80gb"),
        ss.Recipe(**{"seq_len": 1024, "global_batch_size": 32, **recipe}),
        ss.Layout.zero(**layout),
    )


@pytest.mark.parametrize("name", few(PLANS, {"zero-2, every layer recomputed"}))
def test_prediction_equals_rehearsal_of_deepspeed_experts(name: str) -> None:
    plan = build_plan(*PLANS[name], {"num_experts_per_tok": 3} if "three" in name else {})
    [stage] = list_stages(plan)
    predicted = plan.memory()
    for phase in ("rest", "forward", "backward", "optimizer"):
        expected = sum(predicted.at(phase).get(part, 0) for part in TENSOR_COMPONENTS)
        rehearsed = max(peak.num_bytes for peak in stage.peaks if peak.phase == phase)
        assert rehearsed == pytest.approx(expected, rel=CLOSE), phase
    rest = next(peak for peak in stage.peaks if peak.phase == "rest")
    for part in ("parameters", "gradients", "optimizer", "gather_buffers"):
        # Rotary frequencies and DeepSpeed's flags take a few hundred bytes.
        assert 0 <= rest.components.get(part, 0) - predicted.at("rest").get(part, 0) < 4096, part


@pytest.mark.parametrize(
    ("layout", "recipe", "words"),
    [
        ({"stage": 1, "ep": 2, "pp": 2}, {}, "experts inside DeepSpeed's pipeline stages"),
        ({"stage": 1, "ep": 2}, {"method": "lora"}, "peft does not support DeepSpeed's experts"),
    ],
)
def test_unsupported_plans_with_experts_are_rejected(
    layout: dict[str, Any], recipe: dict[str, Any], words: str
) -> None:
    from shardscope.frameworks.deepspeed.rehearsal.rehearse import check_plan

    with pytest.raises(ValueError, match=words):
        check_plan(build_plan(layout, recipe, {}))
