"""How fast products are, by the catalogue: generation by generation, and where widths miss a multiple."""

from __future__ import annotations

import pytest

import shardscope as ss
from shardscope.catalog import load_efficiency
from shardscope.timing.matmul import Products, count_unaligned
from shardscope.timing.rates import look_up_rates


def test_rates_are_read_from_the_catalogue_by_generation() -> None:
    hopper, ampere = (look_up_rates(ss.Cluster.parse(name)) for name in ("h100-sxm-80gb", "a100-sxm-80gb"))
    assert "Hopper GPUs" in hopper.source
    assert "Ampere GPUs" in ampere.source
    for rates in (hopper, ampere):
        rate = rates.get_matmul_rate("bf16")
        assert rate.peak_flops is not None
        assert 0.3 < rate.flops_per_second / rate.peak_flops < 1
    # Twice as fast, and what it moves is two thirds as many bytes: its products must be larger.
    assert hopper.get_matmul_rate("fp8").balance == pytest.approx(
        4 / 3 * hopper.get_matmul_rate("bf16").balance
    )


def test_a_generation_has_what_is_known_of_the_one_it_refines() -> None:
    plain, ultra = (look_up_rates(ss.Cluster.parse(name)) for name in ("b200-sxm-180gb", "b300-sxm-288gb"))
    assert "Blackwell Ultra GPUs" in ultra.source
    for rates in (plain, ultra):
        fused = rates.cudnn_attention["bf16"]
        assert fused.forward / rates.get_matmul_rate("bf16").peak_flops == pytest.approx(
            load_efficiency()["cudnn_attention"]["blackwell"]["forward"]
        )
    # Held by power rather than by its units, and with more FLOPs for a joule.
    watts = [ss.gpus[name].tdp_watts for name in ("b200-sxm-180gb", "b300-sxm-288gb")]
    assert (
        ultra.get_matmul_rate("bf16").flops_per_second / plain.get_matmul_rate("bf16").flops_per_second
        > watts[1] / watts[0]
    )


def test_a_product_off_128_bytes_takes_longer_where_runs_said_so() -> None:
    rate = look_up_rates(ss.Cluster.parse("a100-sxm-80gb")).get_matmul_rate("bf16")
    rows, columns, tokens = 1800, 14_400, 4096

    def seconds(rows: int) -> float:
        one = Products(rows * columns, rows + columns, count_unaligned(rows, columns))
        return one.seconds(tokens, rate)

    assert count_unaligned(1792, columns) == 0 and count_unaligned(rows, columns) == rows * columns
    assert seconds(rows) / seconds(1792) == pytest.approx(
        (1 + rate.unaligned_slowdown) * rows / 1792, rel=1e-3
    )
    assert look_up_rates(ss.Cluster.parse("h100-sxm-80gb")).get_matmul_rate("bf16").unaligned_slowdown == 0
