"""Plain scripts stop at a checkpoint (--model) that they would train as another model."""

from __future__ import annotations

import ast
import importlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.accuracy.sampling import GPT2
from tests.needs import needs

import shardscope as ss
from shardscope.architecture import MixtureOfExperts
from shardscope.export.files import contents

needs("transformers")

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 200,
    "max_position_embeddings": 64,
}
EXPERTS = MixtureOfExperts(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"attention_bias": True},
    "qwen3": {"qk_norm": True},
    "mixtral": {"mixture_of_experts": EXPERTS},
    "qwen3_moe": {"qk_norm": True, "mixture_of_experts": EXPERTS},
    "gpt2": {**GPT2, "num_key_value_heads": 4, "intermediate_size": 128},
}


OWN_FILES = {"ddp": "ddp", "fsdp2": "fsdp2", "deepspeed": "zero"}
"""Frameworks whose train.py is a file of the toolkit, and the names of their layouts."""


def read_config(family: str, layout: str, folder: Path, **other: Any) -> Any:
    """What train.py reads of a checkpoint of the plan's sizes but ``other``."""
    from transformers import AutoConfig

    (config,) = (
        json.loads(file.text)
        for file in contents(plan_of(family, OWN_FILES[layout]))
        if file.name == "config.json"
    )
    (folder / "config.json").write_text(json.dumps(config))
    AutoConfig.for_model(**{**config, **other}).save_pretrained(folder / "checkpoint")
    if layout == "deepspeed":
        needs("deepspeed")
    script = importlib.import_module(f"shardscope.frameworks.{layout}.files.train")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "HERE", folder)
        return script.read_config(str(folder / "checkpoint"))


def plan_of(family: str, layout: str, **degrees: int) -> ss.Plan:
    arch = ss.Architecture(name=family, model_type=family, **{**SIZES, **FAMILIES[family]})
    recipe = ss.Recipe(seq_len=32, global_batch_size=4)
    return ss.Plan(arch, ss.Cluster.parse("2xcpu"), recipe, getattr(ss.Layout, layout)(**degrees))


@cache
def script_of(family: str, layout: str, **degrees: int) -> dict[str, Any]:
    """What the plan's train.py defines of constants and checks, with transformers and without ranks."""
    from transformers import AutoConfig

    plan = plan_of(family, layout, **degrees)
    (text,) = (file.text for file in contents(plan) if file.name == "train.py")
    wanted = ("MODEL_CONFIG", "SEQ_LEN", "SAME", "ALWAYS", "LLAMA3_SCALING")
    wanted += ("value_of", "check_source")
    found: dict[str, Any] = {"AutoConfig": AutoConfig}
    for node in ast.parse(text).body:
        names = [getattr(target, "id", "") for target in getattr(node, "targets", ())]
        if {getattr(node, "name", ""), *names} & set(wanted):
            exec(ast.unparse(node), found)
    # Called before a weight is read.
    read = "config = AutoConfig.from_pretrained(name, **ALWAYS)\n"
    (margin,) = (line.removesuffix(read) for line in text.splitlines(keepends=True) if line.endswith(read))
    read = f"{margin}{read}{margin}check_source(config)\n"
    assert text.count("AutoConfig.from_pretrained(") == text.count(read) == 1
    assert text.index(read) < text.index("AutoModelForCausalLM.from_pretrained(")
    return found


def checked(found: dict[str, Any], **other: Any) -> None:
    """What the script does with a checkpoint of the plan's sizes but ``other``."""
    config = found["AutoConfig"].for_model(**{**found["MODEL_CONFIG"], **other})
    found["check_source"](config)


LAYOUTS = ("megatron",)


@pytest.mark.parametrize("layout", OWN_FILES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_of_the_planned_sizes_is_read(family: str, layout: str, tmp_path: Path) -> None:
    """Rotary base and epsilons are its own, and so is what only generation needs."""
    if family == "gpt2":
        assert read_config(family, layout, tmp_path, layer_norm_epsilon=1e-4).layer_norm_epsilon == 1e-4
        read_config(family, layout, tmp_path, n_inner=None)
        return
    own = {"rms_norm_eps": 1e-5, "bos_token_id": 1, "max_position_embeddings": 128}
    read = read_config(family, layout, tmp_path, rope_parameters=LLAMA3, **own)
    assert {name: getattr(read, name) for name in own} == own
    assert read.rope_parameters["factor"] == LLAMA3["factor"]


@pytest.mark.parametrize("layout", OWN_FILES)
@pytest.mark.parametrize(
    ("family", "other", "words"),
    [
        ("llama", {"num_hidden_layers": 3}, "layers.2.*, and the plan's None"),
        ("llama", {"vocab_size": 250}, r"embed_tokens.weight is \(250, 32\), and the plan's \(200, 32\)"),
        ("qwen2", {"tie_word_embeddings": True}, "lm_head.weight is None, and the plan's"),
        ("mixtral", {"num_experts_per_tok": 3}, "num_experts_per_tok is 3, and the plan's 2"),
        ("gpt2", {"n_inner": 96}, "mlp"),
        ("gpt2", {"max_position_embeddings": 32}, r"wpe.weight is \(32, 32\)"),
    ],
)
def test_a_checkpoint_of_other_sizes_ends_the_script(
    family: str, other: dict[str, Any], words: str, layout: str, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=f"--model: its .*{words}"):
        read_config(family, layout, tmp_path, **other)


@pytest.mark.parametrize("layout", OWN_FILES)
@pytest.mark.parametrize(
    ("family", "own"),
    [
        ("gpt2", {"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1}),
        ("mixtral", {"attention_dropout": 0.1, "router_jitter_noise": 0.2, "output_router_logits": True}),
    ],
)
def test_dropout_and_routing_are_the_plan_s(
    family: str, own: dict[str, Any], layout: str, tmp_path: Path
) -> None:
    read = read_config(family, layout, tmp_path, **own)
    assert {name: getattr(read, name) for name in own} == {name: 0 * value for name, value in own.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_of_the_planned_sizes_goes_in(family: str, layout: str) -> None:
    """Bases of angles and epsilons are its own, and so is what only generation asks for."""
    found = script_of(family, layout)
    checked(found)
    if family == "gpt2":
        checked(found, n_inner=None, layer_norm_epsilon=1e-4)
        return
    own = {"rope_theta": 5e5, "rms_norm_eps": 1e-5, "bos_token_id": 1, "max_position_embeddings": 128}
    checked(found, **own)
    checked(found, rope_parameters=LLAMA3)


SIZED: dict[str, tuple[str, dict[str, Any], str]] = {
    "deeper": (
        "llama",
        {"num_hidden_layers": 3},
        "--model: its num_hidden_layers is 3, and the plan's 2: take",
    ),
    "of more tokens": ("llama", {"vocab_size": 250}, "vocab_size is 250, and the plan's 200"),
    "with a head of its own": ("qwen2", {"tie_word_embeddings": True}, "tie_word_embeddings is True"),
    "of another family": ("llama", {"model_type": "mistral"}, "model_type is 'mistral'"),
    "that asks more experts": ("mixtral", {"num_experts_per_tok": 3}, "num_experts_per_tok is 3, and"),
    "of wider layers inside": ("gpt2", {"n_inner": 96}, "n_inner is 96, and the plan's 128"),
    "of fewer positions": (
        "gpt2",
        {"max_position_embeddings": 32},
        "max_position_embeddings is 32, and the plan's 64",
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("what", SIZED)
def test_every_script_stops_at_a_checkpoint_of_other_sizes(what: str, layout: str) -> None:
    family, other, words = SIZED[what]
    with pytest.raises(SystemExit, match=words):
        checked(script_of(family, layout), **other)


OTHERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "with another activation": ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu', and the plan's"),
    "of more, narrower heads": (
        "llama",
        {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4},
        "num_attention_heads is 8, and the plan's 4",
    ),
    "with biases": ("llama", {"attention_bias": True}, "attention_bias is True, and the plan's False"),
    "with yarn": ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "Megatron-core has"),
    "with other low frequencies": (
        "llama",
        {"rope_parameters": {**LLAMA3, "low_freq_factor": 2.0}},
        "Megatron-core has default rotary angles, or llama3's",
    ),
    "made for other lengths": (
        "llama",
        {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 4096}},
        "Megatron-core has default rotary angles, or llama3's",
    ),
    "with a window": ("mistral", {"sliding_window": 16}, "attends to 16 tokens, and all 32 would be"),
    "whose scores are divided by layers": (
        "gpt2",
        {"scale_attn_by_inverse_layer_idx": True},
        "scale_attn_by_inverse_layer_idx is True, and the plan's False",
    ),
    "with GPT-2's layers and another activation": (
        "gpt2",
        {"activation_function": "relu"},
        "activation_function is 'relu', and the plan's 'gelu_new'",
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_megatron_s_script_stops_at_a_checkpoint(what: str) -> None:
    family, other, words = OTHERS[what]
    with pytest.raises(SystemExit, match=words):
        checked(script_of(family, "megatron"), **other)
