"""Tests of multimodal checkpoints of known families: the language model alone is read and exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.weights_folders import MULTIMODAL_PREFIXES, make_multimodal, rename_multimodal, write_folder

import shardscope as ss
from shardscope.training.weights.weights_folder import WeightsFolder


def write_multimodal(folder: Path, style: str, without: tuple[str, ...] = (), **text: Any) -> Path:
    """A small Llava of zeros with the shipped tokenizer."""
    return make_multimodal(write_folder(folder, **text), style, without)


def make_plan(folder: Path) -> ss.Plan:
    arch = ss.Architecture.from_hf(folder)
    recipe = ss.Recipe(seq_len=32, global_batch_size=4)
    return ss.Plan(arch, ss.Cluster.parse("2xcpu"), recipe, ss.Layout.ddp())


@pytest.mark.parametrize("style", MULTIMODAL_PREFIXES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_multimodal_folder_is_accepted(style: str, tied: bool, tmp_path: Path) -> None:
    folder = write_multimodal(tmp_path / "model", style, tie_word_embeddings=tied)
    plan = make_plan(folder)
    assert plan.architecture.model_type == "llama"
    ss.Finetune(weights=folder).check(plan)
    assert WeightsFolder(folder, "weights").eos_token_id == [1, 106]


@pytest.mark.parametrize("style", MULTIMODAL_PREFIXES)
def test_a_missing_tensor_of_the_language_model_is_refused(style: str, tmp_path: Path) -> None:
    name = rename_multimodal("model.layers.1.mlp.up_proj.weight", style)
    folder = write_multimodal(tmp_path / "model", style, without=(name,))
    with pytest.raises(ValueError, match=rf"without {name}"):
        ss.Finetune(weights=folder).check(make_plan(folder))


def test_a_config_that_says_nothing_of_a_tied_head_names_the_key(tmp_path: Path) -> None:
    folder = write_multimodal(tmp_path / "model", "hub", without=("language_model.lm_head.weight",))
    with pytest.raises(ValueError, match=r"without language_model\.lm_head\.weight.*tie_word_embeddings"):
        ss.Finetune(weights=folder).check(make_plan(folder))


def test_another_tensor_of_the_language_model_is_refused(tmp_path: Path) -> None:
    """Four layers, of which config.json has two: no vision tower that may be ignored."""
    folder = write_multimodal(tmp_path / "model", "hub", num_hidden_layers=4)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] = 2
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"language_model\.model\.layers\.2.*not part of it"):
        ss.Finetune(weights=folder).check(make_plan(folder))


def test_packed_weights_of_the_whole_model_are_refused(tmp_path: Path) -> None:
    folder = write_multimodal(tmp_path / "model", "hub")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.warns(RuntimeWarning, match="unpacked"):
        plan = make_plan(folder)
    with pytest.raises(ValueError, match="packed weights are not unpacked"):
        ss.Finetune(weights=folder).check(plan)
