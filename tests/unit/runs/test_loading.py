"""Tests of the model that a chat and a merge open: of a multimodal base, its language model."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.requirements import needs
from tests.weights_folders import MULTIMODAL_PREFIXES, make_multimodal, rename_multimodal, write_folder

torch = needs("torch")
needs("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

from shardscope.runs.trained.loading import load_weights  # noqa: E402
from shardscope.runs.trained.model_files import ModelFiles  # noqa: E402


@pytest.mark.parametrize("style", MULTIMODAL_PREFIXES)
def test_the_language_model_of_a_multimodal_base_is_opened_and_saved(style: str, tmp_path: Path) -> None:
    folder = make_multimodal(write_folder(tmp_path / "base"), style)
    file = folder / "model.safetensors"
    stored = {name: torch.randn_like(tensor) for name, tensor in load_file(file).items()}
    save_file(stored, file, metadata={"format": "pt"})
    model = load_weights(ModelFiles(weights=str(folder), num_bytes=0), "auto")
    assert type(model).__name__ == "LlamaForCausalLM"
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, stored[rename_multimodal(name, style)]), name
    model.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == dict(model.named_parameters()).keys()
