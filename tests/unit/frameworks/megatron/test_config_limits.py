"""What a config.json says beside sizes, and a framework does not compute, is refused in the kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.needs import needs, needs_installed
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


def plan_of(arch: ss.Architecture, layout: Any, **recipe: Any) -> ss.Plan:
    fields = {"seq_len": 32, "global_batch_size": 4, **recipe}
    return ss.Plan(arch, ss.Cluster.parse("2xcpu"), ss.Recipe(**fields), layout)


def said_of(folder: Path, layout: Any, **config: Any) -> str:
    """What ``Finetune.check`` says, in the kernel, of a small Llama whose config.json has that too."""
    write_folder(folder, **config)
    plan = plan_of(ss.Architecture.from_hf(str(folder)), layout)
    try:
        ss.Finetune(weights=folder).check(plan)
    except ValueError as refusal:
        return str(refusal)
    return ""


@pytest.mark.parametrize(
    "config",
    [
        {"rope_scaling": DYNAMIC},
        {"rope_parameters": DYNAMIC},
        {"rope_scaling": LONG},
        {"rope_parameters": {"full_attention": LONG, "sliding_attention": {"rope_type": "default"}}},
    ],
    ids=["dynamic", "in version 5", "longrope", "of one type of layers"],
)
def test_angles_that_follow_the_largest_position_are_refused_over_parts(
    config: dict[str, Any], tmp_path: Path
) -> None:
    said = said_of(tmp_path / "parts", SPLIT, **config)
    assert "rope_type is " in said and "any but 'dynamic', 'longrope' with cp > 1" in said
    assert said.endswith("Nearest fix: cp=1.")
    assert said_of(tmp_path / "whole", WHOLE, **config) == ""


@pytest.mark.parametrize("rope", [None, YARN, LLAMA3, {"type": "linear", "factor": 2.0}])
def test_other_angles_are_the_same_on_every_part(rope: Any, tmp_path: Path) -> None:
    assert said_of(tmp_path / "model", SPLIT, rope_scaling=rope) == ""


@pytest.mark.parametrize("name", ["su", "yarn"])
def test_phi_3_s_older_names_of_longrope(name: str) -> None:
    plan, rope = plan_of(ss.Architecture.of_size("2m"), SPLIT), {**LONG, "type": name}
    with pytest.raises(ValueError, match="with cp > 1"):
        check_config(plan, {"model_type": "phi3", "rope_scaling": rope})


def test_the_ring_takes_no_model_with_such_angles() -> None:
    """The last to see it, on a rank: a module of somebody's own comes without a config.json."""
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
    for family, rope, is_taken in (
        ("phi3", {**LONG, "rope_type": "longrope"}, False),
        ("llama", DYNAMIC, False),
        ("llama", {"rope_type": "linear", "factor": 2.0}, True),
    ):
        outside = {"original_max_position_embeddings": 40} if family == "phi3" else {}
        config = AutoConfig.for_model(family, **sizes, **outside, rope_scaling=rope)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        if is_taken:
            ring.replace_attention(model)
            assert model.config._attn_implementation == ring.name
            continue
        with pytest.raises(ValueError, match="largest position on a rank"):
            ring.replace_attention(model)
        assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("recipe", "words"),
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
def test_what_trains_on_whole_sequences_alone_says_so(recipe: dict[str, Any], words: str) -> None:
    said = str(why_not_trained(plan_of(ss.Architecture.of_size("2m"), SPLIT, **recipe)))
    assert said.startswith(words) and said.endswith("Nearest fix: cp=1.")


OTHERWISE: dict[str, tuple[dict[str, Any], str]] = {
    "another activation": ({"hidden_act": "gelu"}, "config.hidden_act is 'gelu'; allowed: 'silu', "),
    "yarn": ({"rope_scaling": YARN}, "rope_type 'default', 'linear', or 'llama3' with "),
    "dynamic": ({"rope_parameters": DYNAMIC}, "rope_type 'default', 'linear', or 'llama3' with "),
    "another llama3": ({"rope_scaling": {**LLAMA3, "high_freq_factor": 2.0}}, "which megatron-core's Rotary"),
    "a llama3 from elsewhere": (
        {"rope_scaling": LLAMA3, "original_max_position_embeddings": 4096},
        "which megatron-core's Rotary",
    ),
    "a part of the head": ({"partial_rotary_factor": 0.5}, "config.partial_rotary_factor is 0.5"),
}


@needs_installed("megatron")
@pytest.mark.parametrize("what", OTHERWISE)
def test_what_megatron_computes_otherwise_is_refused_in_the_kernel(what: str, tmp_path: Path) -> None:
    config, words = OTHERWISE[what]
    said = said_of(tmp_path / "megatron", MEGATRON, **config)
    assert words in said and said.endswith("Nearest fix: layout=Layout.fsdp2().")
    assert said_of(tmp_path / "fsdp2", WHOLE, **config) == ""


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
def test_what_megatron_computes_is_let_through(config: dict[str, Any], tmp_path: Path) -> None:
    assert said_of(tmp_path / "model", MEGATRON, **config) == ""


@pytest.mark.parametrize(
    ("family", "said", "words"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "True; allowed: False with Megatron"),
        ("gpt2", {"scale_attn_weights": False}, "False; allowed: True with Megatron"),
        ("mixtral", {"num_experts_per_tok": 1}, "1; allowed: 2 or more where the weights of the chosen"),
    ],
)
def test_scores_noise_and_routers_of_another_kind_are_refused_twice(
    family: str, said: dict[str, Any], words: str
) -> None:
    """In the kernel, from config.json, and on a rank, from what transformers made of one."""
    plan = plan_of(ss.Architecture.of_size("2m"), MEGATRON)
    with pytest.raises(ValueError, match=words):
        check_config(plan, {"model_type": family, **said})
    check_config(plan, {"model_type": family})
    needs("torch")
    needs("transformers")
    from transformers import AutoConfig

    from shardscope.frameworks.megatron.weights.config import convert_config

    with pytest.raises(ValueError, match=words):
        convert_config(AutoConfig.for_model(family, **said))
    assert convert_config(AutoConfig.for_model(family))["layernorm_epsilon"] == 1e-5
