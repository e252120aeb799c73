"""Options of a config.json that FSDP2's context parallelism or Megatron-core does not support raise early."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.requirements import needs, needs_installed
from tests.weights_folders import write_folder

import shardscope as ss
from shardscope.frameworks.registry import check_config, why_not_trained

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
LONG = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [9.0] * 4}

SPLIT, WHOLE, MEGATRON = ss.Layout.fsdp2(cp=2), ss.Layout.fsdp2(), ss.Layout.megatron()


def build_plan(arch: ss.Architecture, layout: Any, **recipe: Any) -> ss.Plan:
    fields = {"seq_len": 32, "global_batch_size": 4, **recipe}
    return ss.Plan(arch, ss.Cluster.parse("2xcpu"), ss.Recipe(**fields), layout)


def check_finetune(folder: Path, layout: Any, **config: Any) -> str:
    """Return the error of ``Finetune.check`` for a small Llama with these config options; empty if none."""
    write_folder(folder, **config)
    plan = build_plan(ss.Architecture.from_hf(str(folder)), layout)
    try:
        ss.Finetune(weights=folder).check(plan)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "config",
    [
        {"rope_scaling": DYNAMIC},
        {"rope_parameters": DYNAMIC},
        {"rope_scaling": LONG},
        {"rope_parameters": {"full_attention": LONG, "sliding_attention": {"rope_type": "default"}}},
    ],
    ids=["dynamic", "in version 5", "longrope", "for one layer type"],
)
def test_cp_raises_for_rotary_angles_that_depend_on_the_largest_position(
    config: dict[str, Any], tmp_path: Path
) -> None:
    message = check_finetune(tmp_path / "parts", SPLIT, **config)
    assert "rope_type is " in message and "any but 'dynamic', 'longrope' with cp > 1" in message
    assert message.endswith("Nearest fix: cp=1.")
    assert check_finetune(tmp_path / "whole", WHOLE, **config) == ""


@pytest.mark.parametrize("rope", [None, YARN, LLAMA3, {"type": "linear", "factor": 2.0}])
def test_cp_supports_other_rotary_angles(rope: Any, tmp_path: Path) -> None:
    assert check_finetune(tmp_path / "model", SPLIT, rope_scaling=rope) == ""


@pytest.mark.parametrize("name", ["su", "yarn"])
def test_older_names_of_longrope_raise_with_cp(name: str) -> None:
    plan, rope = build_plan(ss.Architecture.of_size("2m"), SPLIT), {**LONG, "type": name}
    with pytest.raises(ValueError, match="with cp > 1"):
        check_config(plan, {"model_type": "phi3", "rope_scaling": rope})


def test_ring_attention_raises_for_rotary_angles_of_the_largest_position() -> None:
    """The check on the rank: a user's own module has no config.json that could be checked before."""
    torch = needs("torch")
    needs("transformers")
    from transformers import AutoConfig, AutoModelForCausalLM

    from shardscope.frameworks.fsdp2.engine.ring import Ring

    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 64,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    mesh: Any = None
    ring = Ring(mesh, torch.device("cpu"), repeats_keys=False)
    for family, rope, is_supported in (
        ("phi3", {**LONG, "rope_type": "longrope"}, False),
        ("llama", DYNAMIC, False),
        ("llama", {"rope_type": "linear", "factor": 2.0}, True),
    ):
        outside = {"original_max_position_embeddings": 40} if family == "phi3" else {}
        config = AutoConfig.for_model(family, **sizes, **outside, rope_scaling=rope)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        if is_supported:
            ring.replace_attention(model)
            assert model.config._attn_implementation == ring.name
            continue
        with pytest.raises(ValueError, match="largest position on a rank"):
            ring.replace_attention(model)
        assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ({"method": "qlora"}, "Recipe.method is 'qlora'; allowed: 'full', 'lora' with cp > 1: "),
        (
            {"method": "lora", "quantization": "nf4"},
            "Recipe.quantization is 'nf4'; allowed: None with cp > 1",
        ),
        ({"loss": "chunked"}, "Recipe.loss is 'chunked'; allowed: None, 'full' with cp > 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_recipes_that_cp_does_not_support_raise(recipe: dict[str, Any], expected: str) -> None:
    message = str(why_not_trained(build_plan(ss.Architecture.of_size("2m"), SPLIT, **recipe)))
    assert message.startswith(expected) and message.endswith("Nearest fix: cp=1.")


UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "another activation": ({"hidden_act": "gelu"}, "config.hidden_act is 'gelu'; allowed: 'silu', "),
    "yarn": ({"rope_scaling": YARN}, "rope_type 'default', 'linear', or 'llama3' with "),
    "dynamic": ({"rope_parameters": DYNAMIC}, "rope_type 'default', 'linear', or 'llama3' with "),
    "another llama3": ({"rope_scaling": {**LLAMA3, "high_freq_factor": 2.0}}, "which megatron-core's Rotary"),
    "llama3 with another original length": (
        {"rope_scaling": LLAMA3, "original_max_position_embeddings": 4096},
        "which megatron-core's Rotary",
    ),
    "part of the head": ({"partial_rotary_factor": 0.5}, "config.partial_rotary_factor is 0.5"),
}


@needs_installed("megatron")
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_configs_that_megatron_computes_differently_raise_before_a_launch(name: str, tmp_path: Path) -> None:
    config, expected = UNSUPPORTED[name]
    message = check_finetune(tmp_path / "megatron", MEGATRON, **config)
    assert expected in message and message.endswith("Nearest fix: layout=Layout.fsdp2().")
    assert check_finetune(tmp_path / "fsdp2", WHOLE, **config) == ""


@needs_installed("megatron")
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"hidden_act": "gelu_pytorch_tanh"},
        {"rope_scaling": None},
        {"rope_scaling": LLAMA3},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
    ],
    ids=str,
)
def test_supported_configs_pass(config: dict[str, Any], tmp_path: Path) -> None:
    assert check_finetune(tmp_path / "model", MEGATRON, **config) == ""


@pytest.mark.parametrize(
    ("family", "message", "expected"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "True; allowed: False with Megatron"),
        ("gpt2", {"scale_attn_weights": False}, "False; allowed: True with Megatron"),
        ("mixtral", {"num_experts_per_tok": 1}, "1; allowed: 2 or more where the weights of the chosen"),
    ],
)
def test_attention_scaling_and_routing_are_checked_in_the_notebook_and_on_ranks(
    family: str, message: dict[str, Any], expected: str
) -> None:
    """In the notebook from config.json, on a rank from the transformers config."""
    plan = build_plan(ss.Architecture.of_size("2m"), MEGATRON)
    with pytest.raises(ValueError, match=expected):
        check_config(plan, {"model_type": family, **message})
    check_config(plan, {"model_type": family})
    needs("torch")
    needs("transformers")
    from transformers import AutoConfig

    from shardscope.frameworks.megatron.weights.config import convert_config

    with pytest.raises(ValueError, match=expected):
        convert_config(AutoConfig.for_model(family, **message))
    assert convert_config(AutoConfig.for_model(family))["layernorm_epsilon"] == 1e-5
