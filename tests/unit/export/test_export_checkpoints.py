"""Tests of exported scripts that exit if the checkpoint of ``--model`` differs from the planned model."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from exported_scripts import import_script
from tests.accuracy.sampling import GPT2
from tests.requirements import needs, sample

import shardscope as ss
from shardscope.core.architecture import MixtureOfExperts
from shardscope.export.files import list_files

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


LAYOUTS = {"ddp": "ddp", "fsdp2": "fsdp2", "deepspeed": "zero", "megatron": "megatron"}
"""Frameworks, and the names of their layouts."""
MEGATRON_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Families that Megatron's train.py supports; those of the other frameworks support all."""


def combine_with_frameworks(*cases: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Return the cases, which start with a family, for each framework whose train.py supports the family."""
    return [
        (framework, *case)
        for framework in LAYOUTS
        for case in cases
        if framework != "megatron" or case[0] in MEGATRON_FAMILIES
    ]


def read_config(family: str, framework: str, folder: Path, **other: Any) -> Any:
    """Return the config that train.py reads from a checkpoint with the plan's sizes except ``other``."""
    from transformers import AutoConfig

    script = import_script(framework)
    files = {file.name: file.text for file in list_files(build_plan(family, LAYOUTS[framework]))}
    config = json.loads(files["config.json"])
    (folder / "config.json").write_text(files["config.json"])
    AutoConfig.for_model(**{**config, **other}).save_pretrained(folder / "checkpoint")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "HERE", folder)
        return script.read_config(str(folder / "checkpoint"))


def build_plan(family: str, layout: str, **degrees: int) -> ss.Plan:
    arch = ss.Architecture(name=family, model_type=family, **{**SIZES, **FAMILIES[family]})
    recipe = ss.Recipe(seq_len=32, global_batch_size=4)
    return ss.Plan(arch, ss.Cluster.parse("2xh100-sxm-80gb"), recipe, getattr(ss.Layout, layout)(**degrees))


@sample(6)
@pytest.mark.parametrize(
    ("framework", "family"), combine_with_frameworks(*((family,) for family in FAMILIES))
)
def test_checkpoints_with_the_planned_shapes_are_read(family: str, framework: str, tmp_path: Path) -> None:
    """Rotary base, epsilons and options of generation come from the checkpoint."""
    if family == "gpt2":
        assert read_config(family, framework, tmp_path, layer_norm_epsilon=1e-4).layer_norm_epsilon == 1e-4
        read_config(family, framework, tmp_path, n_inner=None)
        return
    own = {"rms_norm_eps": 1e-5, "bos_token_id": 1, "max_position_embeddings": 128}
    read = read_config(family, framework, tmp_path, rope_parameters=LLAMA3, **own)
    assert {name: getattr(read, name) for name in own} == own
    assert read.rope_parameters["factor"] == LLAMA3["factor"]


@sample(6)
@pytest.mark.parametrize(
    ("framework", "family", "other", "message"),
    combine_with_frameworks(
        ("llama", {"num_hidden_layers": 3}, "layers.2.*, and the plan's None"),
        ("llama", {"vocab_size": 250}, r"embed_tokens.weight is \(250, 32\), and the plan's \(200, 32\)"),
        ("qwen2", {"tie_word_embeddings": True}, "lm_head.weight is None, and the plan's"),
        ("mixtral", {"num_experts_per_tok": 3}, "num_experts_per_tok is 3, and the plan's 2"),
        ("gpt2", {"n_inner": 96}, "mlp"),
        ("gpt2", {"max_position_embeddings": 32}, r"wpe.weight is \(32, 32\)"),
    ),
)
def test_checkpoints_with_other_shapes_exit_the_script(
    family: str, other: dict[str, Any], message: str, framework: str, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=f"--model: its .*{message}"):
        read_config(family, framework, tmp_path, **other)


@pytest.mark.parametrize(
    ("framework", "family", "own"),
    combine_with_frameworks(
        ("gpt2", {"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1}),
        ("mixtral", {"attention_dropout": 0.1, "router_jitter_noise": 0.2, "output_router_logits": True}),
    ),
)
def test_dropout_and_router_options_come_from_the_plan(
    family: str, own: dict[str, Any], framework: str, tmp_path: Path
) -> None:
    read = read_config(family, framework, tmp_path, **own)
    assert {name: getattr(read, name) for name in own} == {name: 0 * value for name, value in own.items()}


@pytest.mark.parametrize(
    ("family", "own", "message"),
    [
        ("llama", {"hidden_act": "gelu"}, "Megatron-core has silu"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
            "rotary angles",
        ),
        ("llama", {"rope_parameters": {**LLAMA3, "low_freq_factor": 2.0}}, "rotary angles"),
        ("mistral", {"sliding_window": 16}, "it attends to 16 tokens"),
    ],
)
def test_megatron_script_exits_for_checkpoints_it_would_compute_differently(
    family: str, own: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=message):
        model = importlib.import_module("shardscope.frameworks.megatron.files.megatron_model")
        model.check_config(read_config(family, "megatron", tmp_path, **own), 32)
