"""Tests of matmul rates from the catalogue: by GPU generation, and for unaligned widths."""

from __future__ import annotations

import pytest

import shardscope as ss
from shardscope.catalog import load_efficiency
from shardscope.timing.matmul import Products, count_unaligned
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
