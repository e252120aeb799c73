"""DeepSpeed's own pipeline on fake tensors, stage by stage, compared with predictions."""

from __future__ import annotations

from typing import Any

import pytest
from tests.in_process_rehearsal import list_stages
from tests.requirements import few, needs, needs_installed, thorough

needs("torch")
needs("transformers")
pytestmark = [needs_installed("deepspeed"), thorough()]

import shardscope as ss  # noqa: E402

CLOSE = 0.03
MODEL = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 5,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 16_000,
    "max_position_embeddings": 4096,
}  # fmt: skip
BUCKET = {"reduce_bucket_size": 4_000_000}
PLANS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "zero-1 bf16": ({"stage": 1, **BUCKET}, {}, {}),
    "zero-0 fp32, tied": ({"stage": 0}, {"precision": "fp32"}, {"tie_word_embeddings": True}),
    "zero-1 fp16, four stages": ({"stage": 1, "pp": 4, **BUCKET}, {"precision": "fp16-mixed"}, {}),
    "zero-0 bf16": ({"stage": 0}, {}, {}),
    "zero-1, every layer recomputed": ({"stage": 1, **BUCKET}, {"recompute": "full"}, {}),
    "zero-1, one micro-batch": ({"stage": 1, **BUCKET}, {"global_batch_size": 4}, {}),
    "zero-1, gradients as they come": ({"stage": 1, "contiguous_gradients": False, **BUCKET}, {}, {}),
}
"""Layout, recipe and model where they differ from two stages of a Llama in bf16."""


def build_plan(name: str) -> ss.Plan:
    layout, recipe, config = PLANS[name]
    return ss.Plan(
        ss.Architecture.from_hf({**MODEL, **config}),
        ss.Cluster.parse("8xh100-sxm-80gb"),
        ss.Recipe(**{"seq_len": 1024, "global_batch_size": 32, **recipe}),
        ss.Layout.zero(**{"pp": 2, **layout}),
    )


@pytest.mark.parametrize("name", few(PLANS, {"zero-1 bf16"}))
def test_every_stage_allocates_the_predicted_bytes(name: str) -> None:
    plan = build_plan(name)
    stages = list_stages(plan)
    assert [stage.num_layers for stage in stages] == list(plan.stage_layers)
    for stage, predicted in zip(stages, plan.memory().by_stage, strict=True):
        assert "PipelineEngine" in stage.note
        others = ("communication", "runtime", "fragmentation")
        expected = {
            phase: sum(size for part, size in predicted.at(phase).components.items() if part not in others)
            for phase in ("rest", "forward", "backward", "optimizer")
        }
        assert stage.peak.num_bytes == pytest.approx(max(expected.values()), rel=CLOSE), (name, stage.stage)
        rest = next(peak for peak in stage.peaks if peak.phase == "rest")
        assert rest.num_bytes == pytest.approx(expected["rest"], rel=CLOSE)
        # Besides weights there are a few numbers: losses.
        parameter_bytes = stage.peak.components["parameters"]
        assert parameter_bytes == pytest.approx(predicted.at("rest").components["parameters"], abs=64)


@pytest.mark.parametrize(
    ("layout", "recipe", "message"),
    [
        ({"stage": 1, "pp": 2, "tp": 2}, {}, "AutoTP shards complete transformers models"),
        ({"stage": 1, "pp": 2}, {"method": "lora"}, "peft wraps the whole model"),
        ({"stage": 1, "pp": 2}, {"loss": "chunked"}, "DeepSpeed's schedule computes the loss"),
    ],
)
def test_unsupported_rehearsals_of_pipelines_raise(
    layout: dict[str, Any], recipe: dict[str, Any], message: str
) -> None:
    from shardscope.frameworks.deepspeed.rehearsal.rehearse import check_plan

    plan = ss.Plan(
        ss.Architecture.from_hf(MODEL),
        ss.Cluster.parse("8xh100-sxm-80gb"),
        ss.Recipe(**{"seq_len": 1024, "global_batch_size": 32, **recipe}),
        ss.Layout.zero(**layout),
    )
    with pytest.raises(ValueError, match=message):
        check_plan(plan)
