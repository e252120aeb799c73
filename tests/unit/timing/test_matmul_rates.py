"""Tests of matmul rates from the catalogue: by GPU generation, and for unaligned widths."""

from __future__ import annotations

import pytest

import shardscope as ss
from shardscope.catalog import load_efficiency
from shardscope.memory.state.lora import Adapters, count_adapter_parameters
from shardscope.timing.matmul import (
    Products,
    count_adapter_products,
    count_adapters,
    count_dora_products,
    count_eager_attention,
    count_layer_products,
    count_unaligned,
)
from shardscope.timing.rates import look_up_rates


def test_rates_come_from_the_catalog_entry_of_the_gpu_generation() -> None:
    hopper, ampere = (look_up_rates(ss.Cluster.parse(name)) for name in ("h100-sxm-80gb", "a100-sxm-80gb"))
    assert "Hopper GPUs" in hopper.source
    assert "Ampere GPUs" in ampere.source
    for rates in (hopper, ampere):
        rate = rates.get_matmul_rate("bf16")
        assert rate.peak_flops is not None
        assert 0.3 < rate.flops_per_second / rate.peak_flops < 1
    # fp8 is twice as fast and moves two thirds of the bytes, so matmuls must be larger to reach its rate.
    assert hopper.get_matmul_rate("fp8").balance == pytest.approx(
        4 / 3 * hopper.get_matmul_rate("bf16").balance
    )


def test_a_refined_gpu_generation_inherits_missing_rates() -> None:
    plain, ultra = (look_up_rates(ss.Cluster.parse(name)) for name in ("b200-sxm-180gb", "b300-sxm-288gb"))
    assert "Blackwell Ultra GPUs" in ultra.source
    for rates in (plain, ultra):
        fused = rates.cudnn_attention["bf16"]
        assert fused.forward / rates.get_matmul_rate("bf16").peak_flops == pytest.approx(
            load_efficiency()["cudnn_attention"]["blackwell"]["forward"]
        )
    # Both are limited by power rather than by their units; Ultra has more FLOPs per joule.
    watts = [ss.gpus[name].tdp_watts for name in ("b200-sxm-180gb", "b300-sxm-288gb")]
    assert (
        ultra.get_matmul_rate("bf16").flops_per_second / plain.get_matmul_rate("bf16").flops_per_second
        > watts[1] / watts[0]
    )


def test_unaligned_matmuls_are_slower_on_gpus_where_it_was_measured() -> None:
    rate = look_up_rates(ss.Cluster.parse("a100-sxm-80gb")).get_matmul_rate("bf16")
    rows, columns, tokens = 1800, 14_400, 4096

    def compute_seconds(rows: int) -> float:
        one = Products(rows * columns, rows + columns, count_unaligned(rows, columns))
        return one.seconds(tokens, rate)

    assert count_unaligned(1792, columns) == 0 and count_unaligned(rows, columns) == rows * columns
    assert compute_seconds(rows) / compute_seconds(1792) == pytest.approx(
        (1 + rate.unaligned_slowdown) * rows / 1792, rel=1e-3
    )
    assert look_up_rates(ss.Cluster.parse("h100-sxm-80gb")).get_matmul_rate("bf16").unaligned_slowdown == 0


@pytest.mark.parametrize(
    ("gpu", "takes_cudnn"),
    [
        ("h100-sxm-80gb", True),
        ("b200-sxm-180gb", True),
        ("b300-sxm-288gb", True),
        ("rtx-5090-32gb", False),
        ("a100-sxm-80gb", False),
        ("l40s-48gb", False),
    ],
)
def test_sdpa_takes_the_kernels_that_torch_prefers(gpu: str, takes_cudnn: bool) -> None:
    rates = look_up_rates(ss.Cluster.parse(gpu))
    assert (rates.sdpa["bf16"] != rates.flash_attention["bf16"]) == takes_cudnn
    if takes_cudnn:
        assert rates.sdpa["bf16"] == rates.cudnn_attention["bf16"]
    assert rates.get_attention_rate("fp32", "sdpa") == rates.get_attention_rate("fp32", "flash")


LORA = ss.Recipe(method="lora", lora_rank=8, lora_targets=("q_proj", "v_proj"))
ADAPTERS = Adapters(("q_proj", "v_proj"), rank=8, use_dora=True)
SHAPES = ((4096, 4096), (1024, 4096))
"""Rows and columns of Llama 3.1 8B's q_proj and v_proj."""


@pytest.mark.parametrize("tp", [1, 2])
def test_adapters_multiply_with_their_own_weights(tp: int) -> None:
    arch = ss.models["llama-3.1-8b"]
    products = count_adapter_products(arch, False, ADAPTERS, tp)
    assert products.weights == count_adapter_parameters(arch, LORA) / arch.num_hidden_layers / tp
    # An input and an output per matrix: the columns and 8, then 8 and the rows.
    assert products.edges == sum((rows + columns) // tp + 2 * 8 for rows, columns in SHAPES)
    assert count_adapters(arch, False, ADAPTERS) == 2


def test_dora_multiplies_both_matrices_with_the_identity() -> None:
    pairs, moved, matrices = count_dora_products(ss.models["llama-3.1-8b"], False, ADAPTERS)
    assert pairs == sum(8 * columns * columns + rows * 8 * columns for rows, columns in SHAPES)
    # Read: the identity, A, their product and B. Written: that product, and the product of all.
    assert moved == sum(
        columns * columns + 8 * columns + 8 * columns + rows * 8 + 8 * columns + rows * columns
        for rows, columns in SHAPES
    )
    assert matrices == sum(rows * columns for rows, columns in SHAPES)


@pytest.mark.parametrize(
    ("name", "heads", "width"), [("llama-3.1-8b", 32, 128 + 128), ("deepseek-v3", 128, (128 + 64) + 128)]
)
def test_eager_attention_multiplies_every_query_with_every_key(name: str, heads: int, width: int) -> None:
    """``width`` is that of a key and of a value; DeepSeek's keys have a rotary part, which values lack."""
    pairs, moved = count_eager_attention(ss.models[name], 100, 7, 2)
    assert pairs == 7 * heads / 2 * 100 * width
    # Each query and score is read or written once for each of the two matmuls.
    assert moved == 7 * heads / 2 * 2 * (100 + width)


@pytest.mark.parametrize(
    ("name", "moe", "last"),
    [
        ("llama-3.1-8b", False, 4096 * 14336),
        ("deepseek-v2-lite", False, 2048 * 10944),
        ("deepseek-v2-lite", True, 0),  # Outputs of experts are weighted after their last matmul.
        ("gemma-2-9b", False, 0),  # A norm follows the MLP.
    ],
)
def test_recomputation_skips_the_last_matmul_where_nothing_saves_a_tensor_after_it(
    name: str, moe: bool, last: int
) -> None:
    assert count_layer_products(ss.models[name], moe, 1, 1, 1).last.weights == last
