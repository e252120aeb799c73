"""Tests of ``Architecture``: parameter counts, FLOPs, errors, JSON and ``of_size``."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardscope.catalog import models
from shardscope.core.architecture import Architecture, LatentAttention, MixtureOfExperts
from shardscope.families.unknown import SIZES

LLAMA = models["llama-3.1-8b"]
DEEPSEEK = models["deepseek-v3"]
BAD_NUMBERS = [
    0,
    -1,
    1e30,
    10**30,
    float("nan"),
    float("inf"),
    -math.inf,
    True,
    False,
    "8",
    "",
    None,
    [8],
    1.5,
]


def test_parameters_of_llama_8b_by_hand() -> None:
    attention = 4096 * 4096 * 2 + 1024 * 4096 * 2
    assert LLAMA.layer_parameters(0) == {"attention": attention, "mlp": 3 * 4096 * 14336, "norm": 2 * 4096}
    assert LLAMA.layer_matrix_parameters(31) == {"attention": attention, "mlp": 3 * 4096 * 14336}
    assert ("attention", "self_attn.k_proj.weight", (1024, 4096)) in LLAMA.layer_shapes(31)
    assert LLAMA.embedding_parameters == LLAMA.lm_head_parameters == 128256 * 4096
    assert LLAMA.final_norm_parameters == 4096
    assert LLAMA.position_embedding_parameters == 0
    assert models["gpt2"].position_embedding_parameters == 1024 * 768
    assert models["gpt2"].lm_head_parameters == 0


@pytest.mark.parametrize("name", list(models))
def test_parameter_groups_and_layers_sum_to_the_total(name: str) -> None:
    arch = models[name]
    layers = range(arch.num_hidden_layers)
    in_layers = sum(sum(arch.layer_parameters(index).values()) for index in layers)
    outer = arch.embedding_parameters + arch.position_embedding_parameters
    outer += arch.lm_head_parameters + arch.final_norm_parameters
    assert in_layers + outer == arch.num_parameters == sum(arch.parameter_groups.values())
    assert all(type(count) is int and count > 0 for count in arch.parameter_groups.values())
    assert 0 < arch.num_active_parameters <= arch.num_parameters
    assert arch.num_moe_layers == sum(map(arch.is_moe_layer, layers))


def test_total_and_active_expert_parameters() -> None:
    assert [DEEPSEEK.is_moe_layer(i) for i in (0, 2, 3, 60)] == [False, False, True, True]
    assert DEEPSEEK.num_moe_layers == 58
    one_expert = 3 * 7168 * 2048
    assert DEEPSEEK.parameter_groups["experts"] == 58 * 256 * one_expert
    assert DEEPSEEK.num_parameters - DEEPSEEK.num_active_parameters == 58 * 248 * one_expert
    assert set(DEEPSEEK.layer_parameters(0)) == {"attention", "mlp", "norm"}
    assert set(DEEPSEEK.layer_parameters(3)) == {"attention", "experts", "shared_experts", "router", "norm"}


def test_lora_shapes_are_out_by_in_for_linear_and_conv1d() -> None:
    assert dict(LLAMA.lora_shapes)["down_proj"] == (4096, 14336)
    assert [target for target, _ in LLAMA.lora_shapes] == [
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    ]
    assert ("c_attn", (3 * 768, 768)) in models["gpt2"].lora_shapes
    assert ("qkv_proj", (9216, 3072)) in models["phi-3-mini"].lora_shapes
    assert not any(target == "gate" for target, _ in DEEPSEEK.lora_shapes)
    assert len(DEEPSEEK.layer_linears(0)) == 5 + 3


# --------------------------------------------------------------------------------------------- FLOPs


def test_flops_follow_kaplan_and_palm() -> None:
    matrices = LLAMA.num_parameters - LLAMA.embedding_parameters - 65 * 4096
    assert LLAMA.matrix_parameters_per_token == matrices
    palm = 6 * matrices + 12 * 32 * 32 * 128 * 4096  # arXiv:2204.02311, appendix B: 6 N + 12 L H Q T
    assert LLAMA.flops_per_token(4096, causal=False) == palm
    assert LLAMA.flops_per_token(4096) == 6 * matrices + 6 * 32 * 32 * 128 * 4096
    gpt = models["megatron-gpt-22b"]
    # Narayanan et al. 2021, equation 3 without recomputation, for one sequence.
    s, layers, h, vocab = 2048, 48, 6144, 51200
    narayanan = 72 * layers * h * h * (1 + s / (6 * h) + vocab / (12 * layers * h))
    assert gpt.flops_per_token(s, causal=False) == pytest.approx(narayanan, rel=1e-12)


def test_flops_of_tied_heads_active_experts_and_latent_attention() -> None:
    tied = dataclasses.replace(LLAMA, tie_word_embeddings=True)
    assert tied.flops_per_token(1) == LLAMA.flops_per_token(1)
    mixtral = models["mixtral-8x7b"]
    active = mixtral.num_active_parameters - mixtral.embedding_parameters - 65 * 4096
    assert mixtral.matrix_parameters_per_token == active
    per_key = DEEPSEEK.flops_per_token(2, causal=False) - DEEPSEEK.flops_per_token(1, causal=False)
    assert per_key == 6 * 61 * 128 * (192 + 128)


def test_sliding_window_limits_attention_flops() -> None:
    mistral = models["mistral-7b"]
    full = dataclasses.replace(mistral, sliding_window=None, sliding_window_layers=0)
    for causal in (True, False):
        assert mistral.flops_per_token(4096, causal) == full.flops_per_token(4096, causal)
        assert mistral.flops_per_token(32768, causal) < full.flops_per_token(32768, causal)
    seen = [min(4096, i + 1) for i in range(32768)]
    keys = (mistral.flops_per_token(32768) - 6 * mistral.matrix_parameters_per_token) / (6 * 32 * 32 * 256)
    assert keys == pytest.approx(sum(seen) / 32768, rel=1e-3)


@given(st.lists(st.integers(1, 10**7), min_size=1, max_size=9), st.booleans())
def test_flops_broadcast_and_grow_with_seq_len(lengths: list[int], causal: bool) -> None:
    for arch in (LLAMA, models["gemma-2-9b"], DEEPSEEK):
        array = arch.flops_per_token(np.array(sorted(lengths)), causal)
        assert array.dtype == np.float64
        assert array.tolist() == [arch.flops_per_token(length, causal) for length in sorted(lengths)]
        assert np.all(np.diff(array) >= 0)


@pytest.mark.parametrize(
    "bad", [*BAD_NUMBERS, np.array([]), np.array([0]), np.array([math.nan]), np.array(["a"])]
)
def test_rejects_invalid_seq_len(bad: Any) -> None:
    with pytest.raises(ValueError, match="seq_len is"):
        LLAMA.flops_per_token(bad)


# -------------------------------------------------------------------------------------------- errors

FLAGS = ["tie_word_embeddings", "attention_bias", "attention_output_bias", "mlp_bias", "gated_mlp", "qk_norm"]


@pytest.mark.parametrize("field", SIZES)
@pytest.mark.parametrize("bad", BAD_NUMBERS)
def test_fault_33_invalid_sizes_raise(field: str, bad: Any) -> None:
    with pytest.raises(ValueError, match=rf"Architecture\.{field} is .*allowed: .*Nearest fix: "):
        dataclasses.replace(LLAMA, **{field: bad})


@pytest.mark.parametrize("field", FLAGS)
@pytest.mark.parametrize("bad", [0, 1, "true", None, math.nan])
def test_fault_33_invalid_flags_raise(field: str, bad: Any) -> None:
    with pytest.raises(ValueError, match=rf"Architecture\.{field} is .*True or False"):
        dataclasses.replace(LLAMA, **{field: bad})


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("name", ""),
        ("name", 7),
        ("name", "a\nb"),
        ("name", "x" * 201),
        ("model_type", "bert"),
        ("model_type", None),
        ("norm", "batchnorm"),
        ("norms_per_layer", 3),
        ("norms_per_layer", True),
        ("position_embedding", "alibi"),
        ("position_embedding", "sinusoidal"),
        ("norms_per_layer", 4),
        ("parallel_residual", True),
        ("new_decoder_architecture", True),
        ("sliding_window", 0),
        ("sliding_window", math.nan),
        ("sliding_window", True),
        ("sliding_window", "8"),
        ("sliding_window_layers", -1),
        ("sliding_window_layers", 33),
        ("num_key_value_heads", 3),
        ("mixture_of_experts", {}),
        ("mixture_of_experts", 8),
        ("latent_attention", "yes"),
    ],
)
def test_fault_33_other_invalid_fields_raise(field: str, bad: Any) -> None:
    with pytest.raises(ValueError, match=rf"Architecture\.{field} .*is .*allowed"):
        dataclasses.replace(LLAMA, **{field: bad})


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(MixtureOfExperts)])
@pytest.mark.parametrize("bad", [-1, 1e30, math.nan, math.inf, True, "8", 1.5])
def test_invalid_expert_sizes_raise(field: str, bad: Any) -> None:
    with pytest.raises(ValueError, match=rf"MixtureOfExperts\.{field} is"):
        dataclasses.replace(DEEPSEEK.mixture_of_experts, **{field: bad})  # type: ignore[type-var]


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(LatentAttention)])
@pytest.mark.parametrize("bad", [0, -1, 1e30, math.nan, math.inf, True, "8", 1.5])
def test_invalid_latent_attention_sizes_raise(field: str, bad: Any) -> None:
    with pytest.raises(ValueError, match=rf"LatentAttention\.{field} is"):
        dataclasses.replace(DEEPSEEK.latent_attention, **{field: bad})  # type: ignore[type-var]


def test_num_experts_per_tok_above_num_experts_raises() -> None:
    with pytest.raises(ValueError, match=r"num_experts_per_tok is 9; allowed: .* 1 to 8\. Nearest fix: 8"):
        MixtureOfExperts(num_experts=8, num_experts_per_tok=9, moe_intermediate_size=4)


@pytest.mark.parametrize("bad", [-1, 32, True, None, "0", 1.0])
def test_invalid_layer_indices_raise(bad: Any) -> None:
    with pytest.raises(ValueError, match="layer_index is"):
        LLAMA.layer_parameters(bad)


# ---------------------------------------------------------------------------------- JSON and copies


@pytest.mark.parametrize("name", list(models))
def test_json_pickle_and_copy_round_trip(name: str) -> None:
    arch = models[name]
    _ = arch.parameter_groups
    assert Architecture.from_json(arch.to_json()) == arch
    assert pickle.loads(pickle.dumps(arch)) == arch == copy.deepcopy(arch)
    assert hash(copy.deepcopy(arch)) == hash(arch)


def test_misspelt_and_missing_keys_raise() -> None:
    data = LLAMA.to_dict()
    with pytest.raises(ValueError, match=r"hidden_sise.*'hidden_size'"):
        Architecture.from_dict({**data, "hidden_sise": 1})
    del data["vocab_size"]
    with pytest.raises(ValueError, match="vocab_size"):
        Architecture.from_dict(data)


def test_numpy_sizes_become_python_ints() -> None:
    arch = dataclasses.replace(LLAMA, vocab_size=np.int32(128256))
    assert type(arch.num_parameters) is int
    assert arch == LLAMA


def test_architecture_is_read_only() -> None:
    with pytest.raises(TypeError):
        LLAMA.parameter_groups["mlp"] = 0  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        LLAMA.hidden_size = 1  # type: ignore[misc]


# ------------------------------------------------------------------------------------------- of_size


@given(st.floats(1, 9_999, allow_nan=False), st.sampled_from("mMbB"))
def test_of_size_has_the_requested_parameters_within_3_percent(number: float, unit: str) -> None:
    number = round(number, 2)
    requested = number * {"m": 1e6, "b": 1e9}[unit.lower()]
    arch = Architecture.of_size(f"{number:.2f}{unit}")
    assert arch.num_parameters == pytest.approx(requested, rel=0.03)
    assert arch.hidden_size == arch.num_attention_heads * arch.head_dim
    assert arch.tie_word_embeddings == (requested < 1e9)
    assert arch.vocab_size == (2_048 if requested < 1e7 else 8_192 if requested < 1e8 else 32_000)
    if requested >= 1e9:
        assert arch.head_dim == 128
        assert arch.num_attention_heads % 8 == 0


def test_of_size_has_usual_shapes() -> None:
    seven = Architecture.of_size(" 7B ")
    assert (seven.hidden_size, seven.num_attention_heads) == (4096, 32)
    assert Architecture.of_size("1t").num_parameters == pytest.approx(1e12, rel=0.03)
    assert Architecture.of_size("2m").num_hidden_layers >= 2


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "7",
        "b",
        "7 billion",
        "-7b",
        "0b",
        "0.5m",
        "11t",
        "1e9",
        "nanb",
        "7g",
        None,
        7,
        7e9,
        True,
        "٧b",
        "7bb",
    ],
)
def test_invalid_size_text_raises_with_an_example(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"size is .*Nearest fix: '"):
        Architecture.of_size(bad)


# ---------------------------------------------------------------------------------------------- cost


def test_repeated_property_access_takes_less_than_50_microseconds() -> None:
    def access_properties() -> None:
        _ = DEEPSEEK.num_parameters, DEEPSEEK.parameter_groups, DEEPSEEK.lora_shapes
        DEEPSEEK.layer_parameters(7)
        DEEPSEEK.flops_per_token(4096)

    access_properties()
    best = math.inf
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(50):
            access_properties()
        best = min(best, (time.perf_counter() - start) / 50)
    assert best < 50e-6


def test_import_loads_no_heavy_library() -> None:
    code = (
        "import sys, shardscope.core.architecture, shardscope.catalog, shardscope.core.cluster;"
        "import shardscope.machine.detection;"
        "shardscope.catalog.models['deepseek-v3'].num_parameters; shardscope.core.cluster.Cluster.detect();"
        "print(sorted({'torch','transformers','pandas','plotly','IPython'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
