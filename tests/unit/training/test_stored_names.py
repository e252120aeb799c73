"""Tests of names and shapes of stored tensors of each family, against files that transformers writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.requirements import few, needs

torch = needs("torch")
needs("transformers")

from tests.runs.families import FAMILIES, architecture  # noqa: E402

import shardscope as ss  # noqa: E402
from shardscope.training.model.model import build_model  # noqa: E402
from shardscope.training.weights.initial_weights import build_initialized, full_region  # noqa: E402
from shardscope.training.weights.stored_names import is_unused  # noqa: E402
from shardscope.training.weights.stored_weights import StoredWeights, TensorsByName  # noqa: E402
from shardscope.training.weights.weights_folder import WeightsFolder  # noqa: E402

FAMILY_OF_EACH_KIND = ("llama", "mixtral", "deepseek_v3", "gpt2", "gpt_neox")


def save_model(family: str, folder: Path) -> Any:
    """Return a model of ``family``, which transformers saves to ``folder`` in several files."""
    torch.manual_seed(3)
    model = build_model(architecture(family, 2))
    model.save_pretrained(folder, max_shard_size="300KB")
    return model


def open_weights(folder: Path) -> StoredWeights:
    found = WeightsFolder.open(folder, "weights")
    return StoredWeights(found, found.architecture)


@pytest.mark.parametrize("family", few(FAMILIES, FAMILY_OF_EACH_KIND))
def test_files_that_transformers_wrote_are_read(family: str, tmp_path: Path) -> None:
    model = save_model(family, tmp_path)
    folder = WeightsFolder.open(tmp_path, "weights")
    cluster, recipe = ss.Cluster.parse("1xcpu"), ss.Recipe(seq_len=32)
    folder.check_plan(ss.Plan(architecture(family, 2), cluster, recipe, ss.Layout.ddp()))
    read = build_initialized(lambda: build_model(architecture(family, 2)), lambda _: open_weights(tmp_path))
    assert [name for name, _ in read.named_parameters()] == [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        assert torch.equal(read.get_parameter(name), parameter), name
    assert read.config.tie_word_embeddings == model.config.tie_word_embeddings
    if model.config.tie_word_embeddings:
        assert read.get_input_embeddings().weight is read.get_output_embeddings().weight


def test_a_routers_stored_bias_is_read(tmp_path: Path) -> None:
    """DeepSeek-V3's router bias is a buffer, but one that must be read from the file."""
    arch = architecture("deepseek_v3", 2)
    model = build_model(arch)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    stored = torch.arange(float(len(model.get_buffer(bias))))
    model.get_buffer(bias).copy_(stored)
    model.save_pretrained(tmp_path)
    read = build_initialized(lambda: build_model(arch), lambda _: open_weights(tmp_path))
    assert torch.equal(read.get_buffer(bias), stored)
    assert is_unused(arch, "model.layers.2.eh_proj.weight"), "its layer for a second token"
    assert not is_unused(arch, "model.layers.1.eh_proj.weight")


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_region_equals_that_region_of_the_whole_tensor(family: str, tmp_path: Path) -> None:
    model = save_model(family, tmp_path)
    stored = open_weights(tmp_path)
    by_name = TensorsByName(stored)
    assert set(by_name) == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        assert torch.equal(by_name[name].detach(), parameter)
        sizes = tuple(parameter.shape)
        regions = [
            [range(size // 3, size - size // 4) for size in sizes],
            [range(1), *full_region(parameter.shape)[1:]],
            [range(sizes[0], sizes[0]), *full_region(parameter.shape)[1:]],
        ]
        for region in regions:
            into = torch.full([len(run) for run in region], torch.nan)
            stored.write(name, parameter.shape, region, into)
            assert torch.equal(into, parameter[tuple(slice(run.start, run.stop) for run in region)])
        if parameter.ndim == 3:
            assert torch.equal(by_name[name][2], parameter[2])
    stored.close()
    with pytest.raises(RuntimeError, match="the model has nothing of shape"):
        stored.write("nothing", torch.Size([1]), [range(1)], torch.zeros(1))
    with pytest.raises(RuntimeError, match=r"of shape \(3,\)"):
        stored.write("model.norm.weight", torch.Size([3]), [range(3)], torch.zeros(3))


def test_16_bit_weights_are_cast_to_the_target_type(tmp_path: Path) -> None:
    model = save_model("llama", tmp_path).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    read = build_initialized(lambda: build_model(architecture("llama", 2)), lambda _: open_weights(tmp_path))
    for name, parameter in model.named_parameters():
        assert read.get_parameter(name).dtype == torch.float32
        assert torch.equal(read.get_parameter(name), parameter.float())
