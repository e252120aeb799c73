"""Gemma 4, which has no formulas: all three of its layouts train to the same losses under every framework."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.requirements import few, needs, thorough

needs("torch")
needs("transformers", minversion="5.0")
needs("deepspeed")

import shardscope as ss  # noqa: E402

pytestmark = thorough()

SIZES: dict[str, Any] = {
    "model_type": "gemma4_text",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "vocab_size": 2048,
    "max_position_embeddings": 512,
    "sliding_window": 16,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
}
WIDE_HEADS = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
MODELS = {
    "31B": WIDE_HEADS,
    "E2B": {
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 2048,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "26B-A4B": {
        **WIDE_HEADS,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
}
LAYOUTS = {
    "fsdp2": (ss.Layout.fsdp2(), "none"),
    # Layers that share keys and values of earlier layers are recomputed with those.
    "fsdp2, recomputed": (ss.Layout.fsdp2(), "full"),
    "zero3, recomputed": (ss.Layout.zero(stage=3), "full"),
}


def train(model: str, layout: ss.Layout, recompute: str, folder: Path) -> list[float]:
    """Return the losses of two steps on two CPU ranks."""
    # Its text part, as the fix for the whole config.json has it.
    arch = ss.Architecture.from_hf({**SIZES, **MODELS[model]}, rehearse_only=True)
    recipe = ss.Recipe(
        seq_len=32, micro_batch_size=1, global_batch_size=4, precision="fp32", recompute=recompute
    )
    plan = ss.Plan(arch, ss.Cluster.parse("2xcpu"), recipe, layout)
    run = ss.launch(plan, ss.Pretrain(num_steps=2), folder=folder)
    assert run.wait(timeout=300) == "finished", run.error
    return [entry["loss"] for entry in run.metrics() if entry["rank"] == 0 and "loss" in entry]


@pytest.mark.parametrize("model", few(list(MODELS), ["E2B"]))
def test_gemma4_has_the_losses_of_ddp_under_all_frameworks(model: str, tmp_path: Path) -> None:
    expected = train(model, ss.Layout.ddp(), "none", tmp_path / "ddp")
    assert len(expected) == 2
    for name, (layout, recompute) in LAYOUTS.items():
        losses = train(model, layout, recompute, tmp_path / name.replace(", ", "-"))
        assert losses == pytest.approx(expected, abs=2e-5), name


@pytest.mark.parametrize("model", MODELS)
def test_gemma4_is_refused_with_its_rehearsal_as_the_fix(model: str) -> None:
    text = {**SIZES, **MODELS[model]}
    with pytest.raises(ValueError, match=r"from_hf\(config, rehearse_only=True\)"):
        ss.Architecture.from_hf(text)
    with pytest.raises(ValueError, match=r"'gemma4'.*a language model, not a wrapper"):
        ss.Architecture.from_hf({"model_type": "gemma4", "text_config": text})
