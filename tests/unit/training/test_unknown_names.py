"""Tests of the files of a family without formulas: names that transformers maps, and what it ignores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.requirements import needs

torch = needs("torch")
transformers = needs("transformers")

import shardscope as ss  # noqa: E402
from shardscope.training.model.model import build_from_config  # noqa: E402
from shardscope.training.weights.initial_weights import build_initialized  # noqa: E402
from shardscope.training.weights.stored_weights import StoredWeights  # noqa: E402
from shardscope.training.weights.weights_folder import WeightsFolder  # noqa: E402

TEXT = {
    "model_type": "qwen3_5_text",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "mrope_section": [2, 1, 1]},
}
VISION = {"model_type": "qwen3_5_vision", "depth": 1, "hidden_size": 16, "intermediate_size": 32}
MULTIMODAL = {
    "model_type": "qwen3_5",
    "text_config": TEXT,
    "vision_config": {**VISION, "num_heads": 2, "out_hidden_size": 32, "num_position_embeddings": 16},
    "tie_word_embeddings": True,
}


def save_multimodal(folder: Path) -> Any:
    """Return a Qwen3.5 as it is on the Hub, with its vision tower; its language model is all that trains."""
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(**MULTIMODAL)
    model = transformers.Qwen3_5ForConditionalGeneration(config)
    model.save_pretrained(folder)
    return model


def make_plan(architecture: ss.Architecture) -> ss.Plan:
    return ss.Plan(architecture, ss.Cluster.parse("1xcpu"), ss.Recipe(seq_len=32), ss.Layout.ddp())


def test_the_language_model_of_a_multimodal_checkpoint_is_read(tmp_path: Path) -> None:
    saved = save_multimodal(tmp_path)
    arch = ss.Architecture.from_hf(tmp_path, rehearse_only=True)
    folder = WeightsFolder.open(tmp_path, "weights")
    folder.check_plan(make_plan(arch))
    read = build_initialized(
        lambda: build_from_config(folder.config, arch), lambda _: StoredWeights(folder, arch)
    )
    stored = dict(saved.model.language_model.named_parameters())
    assert {name.removeprefix("model.") for name, _ in read.named_parameters()} == set(stored)
    for name, parameter in stored.items():
        assert torch.equal(read.get_parameter(f"model.{name}"), parameter), name
    assert read.get_output_embeddings().weight is read.get_input_embeddings().weight


def test_another_plan_than_that_of_the_files_is_refused(tmp_path: Path) -> None:
    save_multimodal(tmp_path)
    folder = WeightsFolder.open(tmp_path, "weights")
    other = ss.Architecture.from_hf({**TEXT, "hidden_size": 48}, rehearse_only=True)
    with pytest.raises(ValueError, match=r"from_hf\(.*rehearse_only=True\)"):
        folder.check_plan(make_plan(other))


def test_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_multimodal(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.language_model.layers.0.linear_attn.A_log"]
    save_file(tensors, file, metadata={"format": "pt"})
    folder = WeightsFolder.open(tmp_path, "weights")
    with pytest.raises(ValueError, match=r"without model\.layers\.0\.linear_attn\.A_log"):
        folder.check_plan(make_plan(ss.Architecture.from_hf(tmp_path, rehearse_only=True)))


def test_an_export_has_the_config_of_the_language_model(tmp_path: Path) -> None:
    save_multimodal(tmp_path / "model")
    exported = tmp_path / "export"
    exported.mkdir()
    written = {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "dtype": "float32"}
    (exported / "config.json").write_text(json.dumps(written))
    WeightsFolder.open(tmp_path / "model", "weights").write_config(exported)
    config = json.loads((exported / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5ForCausalLM"]
    assert config["hidden_size"] == TEXT["hidden_size"]
    assert "vision_config" not in config


def test_files_whose_tensors_transformers_merges_are_refused(tmp_path: Path) -> None:
    config = {**TEXT, "model_type": "qwen3_5_moe_text", "num_experts": 4, "num_experts_per_tok": 2}
    config |= {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    model.save_pretrained(tmp_path)
    folder = WeightsFolder.open(tmp_path, "weights")
    with pytest.raises(ValueError, match=r"experts.*merges or splits.*Script"):
        folder.check_plan(make_plan(ss.Architecture.from_hf(tmp_path, rehearse_only=True)))
