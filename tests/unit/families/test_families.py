"""Tests of all model families: FLOPs, unsupported layers and tensor-parallel shards."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from tests.requirements import few, sample

import shardscope as ss
from shardscope.catalog import models
from shardscope.core.architecture import MODEL_TYPES, Architecture
from shardscope.families.parameter_names import list_attention_inputs, list_mlp_inputs, list_parameter_names
from shardscope.memory.activations.forward import FAMILIES_WITH_ACTIVATIONS
from shardscope.memory.state import stages

ONE_OF_EACH = {arch.model_type: arch for arch in models.values()}


def test_every_family_has_a_catalog_model_and_activation_formulas() -> None:
    assert set(ONE_OF_EACH) == set(MODEL_TYPES) == FAMILIES_WITH_ACTIVATIONS


# --------------------------------------------------------------------------------------------- FLOPs


@sample(8)
@pytest.mark.parametrize("name", few(sorted(models), [arch.name for arch in ONE_OF_EACH.values()]))
def test_flops_are_6_per_matrix_parameter_plus_attention_scores(name: str) -> None:
    """Count FLOPs again, tensor by tensor (Kaplan et al. 2020, section 2.1; PaLM, appendix B)."""
    arch = models[name]
    moe = arch.mixture_of_experts
    matrices = arch.vocab_size * arch.hidden_size
    for index in range(arch.num_hidden_layers):
        for group, parameter, shape in arch.layer_shapes(index):
            if len(shape) == 1 or parameter.endswith("_bias"):
                continue
            size = math.prod(shape)
            if group == "experts":
                assert moe is not None
                size = size * moe.num_experts_per_tok // moe.num_experts
            matrices += size
    latent = arch.latent_attention
    width = latent.qk_head_dim + latent.v_head_dim if latent else 2 * arch.head_dim
    seq_len = 4096
    windows = [seq_len] * (arch.num_hidden_layers - arch.sliding_window_layers)
    windows += [min(seq_len, arch.sliding_window or seq_len)] * arch.sliding_window_layers
    scores = 6 * sum(windows) * arch.num_attention_heads * width
    assert arch.flops_per_token(seq_len, causal=False) == 6 * matrices + scores
    # With a causal mask, each token attends to itself and to earlier tokens within the window.
    visible_keys = [
        sum(min(window, position + 1) for position in range(seq_len)) / seq_len for window in windows
    ]
    causal = 6 * matrices + 6 * sum(visible_keys) * arch.num_attention_heads * width
    assert arch.flops_per_token(seq_len) == pytest.approx(causal, rel=1e-3)


def test_sliding_window_on_every_other_layer_halves_flops_growth() -> None:
    oss = models["gpt-oss-20b"]
    growth = oss.flops_per_token(65_536) - oss.flops_per_token(32_768)
    full = dataclasses.replace(oss, sliding_window=None, sliding_window_layers=0)
    assert growth == pytest.approx(
        (full.flops_per_token(65_536) - full.flops_per_token(32_768)) / 2, rel=1e-2
    )
    gemma = models["gemma-3-27b"]
    lengths = np.array([1_024, 8_192, 131_072])
    everywhere = dataclasses.replace(gemma, sliding_window=None, sliding_window_layers=0)
    ratio = gemma.flops_per_token(lengths) / everywhere.flops_per_token(lengths)
    assert ratio[0] == 1
    assert ratio[2] < ratio[1] < 1


def test_flops_count_active_and_shared_experts_only() -> None:
    qwen = models["qwen1.5-moe-a2.7b"]
    experts = qwen.mixture_of_experts
    assert experts is not None
    idle = dataclasses.replace(
        qwen, mixture_of_experts=dataclasses.replace(experts, num_experts=2 * experts.num_experts)
    )
    router = qwen.num_hidden_layers * experts.num_experts * qwen.hidden_size
    assert idle.flops_per_token(1) - qwen.flops_per_token(1) == 6 * router
    shared = 3 * qwen.hidden_size * experts.shared_expert_intermediate_size
    assert qwen.layer_matrix_parameters(0)["shared_experts"] == shared + qwen.hidden_size
    # arXiv:2508.10925, table 1: 3.61 and 5.13 billion active parameters without the embedding.
    for name, billions in (("gpt-oss-20b", 3.61), ("gpt-oss-120b", 5.13)):
        active = models[name].num_active_parameters - models[name].embedding_parameters
        assert active / 1e9 == pytest.approx(billions, abs=0.005)


# ------------------------------------------------------------------------------ unsupported layers


@pytest.mark.parametrize("name", ["pythia-1b", "phi-2", "falcon-7b", "olmo-2-7b", "gpt-oss-20b"])
def test_families_that_megatron_does_not_support_raise(name: str) -> None:
    cluster, recipe = ss.Cluster.parse("8xh100-sxm-80gb"), ss.Recipe(seq_len=1024, global_batch_size=64)
    with pytest.raises(ValueError, match=r"Architecture\.model_type is .*layout=Layout\.fsdp2\(\)"):
        ss.Plan(models[name], cluster, recipe, ss.Layout.megatron()).memory()
    assert ss.Plan(models[name], cluster, recipe, ss.Layout.fsdp2()).memory().peak_bytes > 0


def test_memory_of_alibi_models_raises() -> None:
    plan = ss.Plan(
        models["falcon-rw-1b"],
        ss.Cluster.parse("8xh100-sxm-80gb"),
        ss.Recipe(seq_len=1024),
        ss.Layout.fsdp2(),
    )
    with pytest.raises(ValueError, match=r"position_embedding is 'alibi'.*plan\.rehearse\(\)"):
        plan.memory()


# --------------------------------------------------------------------------------- tensor parallelism


@pytest.mark.parametrize("family", MODEL_TYPES)
def test_shards_of_tp_2_sum_to_the_whole_layer(family: str) -> None:
    arch = _with_even_heads(ONE_OF_EACH[family])
    for moe in {arch.is_moe_layer(index) for index in range(arch.num_hidden_layers)}:
        whole, sharded = (
            {shape.name: shape for shape in stages.list_rank_shapes(arch, moe, tp, 1)} for tp in (1, 2)
        )
        assert whole.keys() == sharded.keys()
        replicated = {
            name
            for name in whole
            if (whole[name].rows, whole[name].columns) == (sharded[name].rows, sharded[name].columns)
        }
        for name in whole.keys() - replicated:
            numbers = [shape.copies * shape.rows * shape.columns for shape in (whole[name], sharded[name])]
            assert numbers[0] == 2 * numbers[1], name
        names = list_parameter_names(arch)
        inputs = {*list_attention_inputs(arch), *list_mlp_inputs(arch)} - {"q_a_proj", "kv_a_proj_with_mqa"}
        for module in {*inputs, names.output, names.down}:
            assert not any(name.endswith(f".{module}.weight") for name in replicated), module
        for name in whole.keys() - replicated:
            if whole[name].group != "experts":
                row_parallel = name.split(".")[-2] in {names.output, names.down}
                assert (sharded[name].columns < whole[name].columns) == row_parallel, name
        for name in replicated:
            group, vector = whole[name].group, whole[name].columns == 1
            assert vector or group in ("router", "experts") or name.split(".")[-2] in stages._REPLICATED, name


def _with_even_heads(arch: Architecture) -> Architecture:
    if arch.num_attention_heads % 2 == 0:
        return arch
    return dataclasses.replace(
        arch, num_attention_heads=2, num_key_value_heads=2, head_dim=arch.hidden_size // 2
    )
