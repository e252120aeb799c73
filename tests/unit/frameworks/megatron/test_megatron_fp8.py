"""Megatron's fp8 by hand, tensor by tensor as Transformer Engine 2.20's ``save_for_backward`` lists them.

None of it was run: Transformer Engine needs CUDA. The tests compare the formulas with its source.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.random_plans import LATENT, LLAMA, MOE

import shardscope as ss
from shardscope.core.errors import FieldError
from shardscope.core.plan import Plan
from shardscope.frameworks.megatron.fp8 import count_operand_copies
from shardscope.frameworks.megatron.memory.layer import ShardCounts, compute_layer
from shardscope.memory.activations.modules.saved_tensors import Modules
from shardscope.prediction.batch.memory import compute_peaks

LLAMA_8B = ss.models["llama-3.1-8b"]
HIDDEN, INNER, KEYS, HEADS = 4096, 14_336, 1024, 32


def count_saved_bytes(
    arch: Any, *, moe: bool = False, eight: bool = True, recompute: str = "none", **more: Any
) -> int:
    modules = Modules("megatron", False, 2, 4096, eight_bit_inputs=eight, **more)
    return compute_layer(
        arch, moe, modules, recompute, ShardCounts(1, 1, 1, 1, gradient_copies=2 * eight)
    ).saved


def plan(cluster: str = "8xh100-sxm-80gb", **recipe: Any) -> Plan:
    layout = recipe.pop("layout", {})
    arch = recipe.pop("arch", LLAMA_8B)
    chosen_recipe = ss.Recipe(**{"precision": "fp8-mixed", "global_batch_size": 64, **recipe})
    return Plan(arch, ss.Cluster.parse(cluster), chosen_recipe, ss.Layout.megatron(**layout))


def test_a_llama_layer_by_hand() -> None:
    norms = 2 * (2 * HIDDEN + 4)  # each its input in bf16, and 1 / rms
    products = HIDDEN + HIDDEN + HIDDEN + INNER  # inputs of qkv, proj, fc1 and fc2 in 8 bits
    attention = 2 * (HIDDEN + 2 * KEYS + HIDDEN) + 4 * HEADS  # operands, output, one statistic per head
    activation = 2 * (2 * INNER)  # SwiGLU's input
    assert count_saved_bytes(LLAMA_8B) == norms + products + attention + activation
    # In bf16 the two norms' outputs and fc2's input have two bytes, and proj's is attention's own.
    assert (
        count_saved_bytes(LLAMA_8B, eight=False) - count_saved_bytes(LLAMA_8B) == 2 * HIDDEN + INNER - HIDDEN
    )


def test_eager_attention_saves_no_output_of_its_own() -> None:
    difference = count_saved_bytes(LLAMA_8B, eight=False, attention="eager") - count_saved_bytes(
        LLAMA_8B, attention="eager"
    )
    assert difference == 2 * HIDDEN + INNER + HIDDEN


def test_recomputed_attention_saves_no_output_of_its_own() -> None:
    difference = count_saved_bytes(LLAMA_8B, eight=False, recompute="selective") - count_saved_bytes(
        LLAMA_8B, recompute="selective"
    )
    assert difference == 2 * HIDDEN + INNER + HIDDEN


def test_a_recomputed_layer_saves_its_input_in_bf16() -> None:
    assert count_saved_bytes(LLAMA_8B, recompute="full") == 2 * HIDDEN


def test_experts_by_hand() -> None:
    experts = MOE.mixture_of_experts
    assert experts is not None and not experts.shared_expert_intermediate_size
    routed = experts.num_experts_per_tok * (MOE.hidden_size + experts.moe_intermediate_size)
    # qkv's input; tokens and activations of experts; proj's copy comes on top. The router's is bf16.
    output = MOE.num_attention_heads * MOE.head_dim
    assert (
        count_saved_bytes(MOE, moe=True, eight=False) - count_saved_bytes(MOE, moe=True)
        == MOE.hidden_size + routed - output
    )


def test_latent_attention_by_hand() -> None:
    latent = LATENT.latent_attention
    assert latent is not None
    # Both products that read the first norm copy its output, as many bytes as it has in bf16.
    inputs = LATENT.hidden_size + (latent.q_lora_rank or 0) + latent.kv_lora_rank + LATENT.intermediate_size
    output = LATENT.num_attention_heads * latent.v_head_dim
    assert count_saved_bytes(LATENT, eight=False) - count_saved_bytes(LATENT) == inputs - output


@pytest.mark.parametrize(
    ("cluster", "number"), [("8xh100-sxm-80gb", 2), ("8xb200-sxm-180gb", 1), ("8xrtx-5090-32gb", 2)]
)
def test_weights_have_an_8_bit_copy_and_before_blackwell_its_transpose(cluster: str, number: int) -> None:
    assert count_operand_copies(ss.Cluster.parse(cluster).gpu) == number
    matrices = 32 * (HIDDEN * (HIDDEN + 2 * KEYS) + HIDDEN * HIDDEN + 3 * HIDDEN * INNER)
    parameters = [
        plan(cluster, precision=precision).memory().components["parameters"]
        for precision in ("bf16-mixed", "fp8-mixed")
    ]
    assert parameters[1] - parameters[0] == number * matrices


def test_8_bit_expert_weights_are_sharded_by_ep() -> None:
    whole, sharded = (
        plan(arch=MOE, precision="fp8-mixed", layout=layout).memory().components["parameters"]
        - plan(arch=MOE, precision="bf16-mixed", layout=layout).memory().components["parameters"]
        for layout in ({}, {"ep": 2})
    )
    experts = MOE.mixture_of_experts
    assert experts is not None
    expert = 3 * MOE.hidden_size * experts.moe_intermediate_size
    assert whole - sharded == 2 * MOE.num_moe_layers * experts.num_experts // 2 * expert


def test_gradients_and_optimizer_equal_bf16() -> None:
    eight, half = plan().memory(), plan(precision="bf16-mixed").memory()
    for name in ("gradients", "optimizer", "logits"):
        assert eight.components[name] == half.components[name]
    assert eight.components["activations"] < half.components["activations"]


def test_explanations_state_that_fp8_was_never_run() -> None:
    report = plan().memory()
    for name in ("parameters", "activations"):
        assert "Transformer Engine 2.20's source and never run" in report.explain(name)
        assert "Transformer Engine 2.20" not in plan(precision="bf16-mixed").memory().explain(name)


def test_batches_of_plans_have_the_same_bytes() -> None:
    plans = [
        plan(arch=arch, cluster=cluster, micro_batch_size=micro, layout=layout)
        for arch in (LLAMA, MOE, LLAMA_8B)
        for cluster in ("8xh100-sxm-80gb", "8xb200-sxm-180gb")
        for micro in (1, 2)
        for layout in ({}, {"tp": 2}, {"pp": 2})
    ]
    assert compute_peaks(plans).tolist() == [one.memory().peak_bytes for one in plans]


@pytest.mark.parametrize(
    ("cluster", "recipe", "field"),
    [
        ("8xa100-sxm-80gb", {}, "Recipe.precision"),
        ("8xmi300x-192gb", {}, "Recipe.precision"),
        ("2xcpu", {}, "Recipe.precision"),
        ("8xh100-sxm-80gb", {"seq_len": 4095}, "Recipe.seq_len"),
        ("8xh100-sxm-80gb", {"arch": replace(LLAMA_8B, intermediate_size=14_344)}, "Layout.tp"),
    ],
)
def test_unsupported_gpus_and_sizes_raise(cluster: str, recipe: dict[str, Any], field: str) -> None:
    with pytest.raises(FieldError) as caught:
        plan(cluster, **recipe)
    assert caught.value.field == field


def test_sequence_shards_must_be_multiples_of_8_tokens() -> None:
    with pytest.raises(FieldError, match="multiple of 8 tokens"):
        plan(seq_len=4 * 8 * 3 + 4 * 4, layout={"tp": 4})
