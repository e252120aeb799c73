"""Tests of ``Calibration``: JSON, fitted rates, invalid fields, and the source that predictions name."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from calibrations import (
    ATTENTION_BACKWARD,
    ATTENTION_FORWARD,
    FLOPS,
    HALF_KEYS,
    HALF_SIZE,
    KERNEL_SECONDS,
    LINK_BYTES_PER_SECOND,
    LINK_LATENCY_SECONDS,
    MEMORY_BYTES_PER_SECOND,
    make_calibration,
)
from hypothesis import given
from hypothesis import strategies as st

import shardscope as ss
from shardscope.timing.calibration.curves import Calibration
from shardscope.timing.calibration.fit import Term, fit_two_terms
from shardscope.timing.collectives import compute_call_seconds
from shardscope.timing.rates import look_up_rates

CPU = ss.Cluster.parse("2xcpu")


def test_calibration_survives_a_json_round_trip() -> None:
    one = make_calibration()
    assert Calibration.from_json(one.to_json()) == one


def test_fitted_rates_equal_the_speeds_of_the_measurements() -> None:
    rates = make_calibration().rates(CPU)
    for precision in ("fp32", "bf16"):
        rate = rates.get_matmul_rate(precision)
        assert rate.flops_per_second == pytest.approx(FLOPS, rel=1e-3)
        assert rate.half_size == pytest.approx(HALF_SIZE, rel=1e-2)
        assert rate.peak_flops is None
    assert rates.get_memory_bandwidth() == pytest.approx(MEMORY_BYTES_PER_SECOND, rel=1e-3)
    assert rates.kernel_seconds == KERNEL_SECONDS
    assert rates.inside.bytes_per_second == pytest.approx(LINK_BYTES_PER_SECOND, rel=1e-2)
    assert rates.inside.latency_seconds == pytest.approx(LINK_LATENCY_SECONDS, rel=1e-2)
    attention = rates.get_attention_rate("fp32", "sdpa")
    assert attention.forward == pytest.approx(ATTENTION_FORWARD, rel=1e-6)
    assert attention.backward == pytest.approx(ATTENTION_BACKWARD, rel=1e-6)
    assert attention.half_keys == pytest.approx(HALF_KEYS, rel=1e-6)
    assert rates.host_updates_per_second == 2e8
    assert "calibration" in rates.source and "2 ranks of cpu" in rates.source


def test_unmeasured_rates_are_those_of_the_catalog() -> None:
    cluster = ss.Cluster.parse("8xh100-sxm-80gb")
    one = make_calibration("1xh100-sxm-80gb", collectives=[], attention=[])
    rates, known = one.rates(cluster), look_up_rates(cluster)
    assert rates.inside == known.inside
    assert rates.between == known.between
    assert rates.host == known.host
    assert rates.sdpa == known.sdpa
    assert rates.get_matmul_rate("fp8") == known.get_matmul_rate("fp8")
    assert rates.get_matmul_rate("bf16").flops_per_second == pytest.approx(FLOPS, rel=1e-3)
    assert rates.get_matmul_rate("bf16").peak_flops == cluster.gpu.peak_flops["bf16"]


def test_collective_times_are_interpolated_from_measurements() -> None:
    calls = [{"collective": "all_gather", "num_bytes": 4**k, "seconds": 1e-4 * 3**k} for k in (5, 7, 9)]
    rates = make_calibration("8xh100-sxm-80gb", collectives=calls).rates(
        ss.Cluster.parse("2x8xh100-sxm-80gb")
    )

    def compute_seconds(num_bytes: Any, ranks: Any, messages: Any = 1, name: Any = "all_gather") -> Any:
        return compute_call_seconds(name, num_bytes, ranks, 1, messages, 8, rates)

    for call in calls:
        assert compute_seconds(call["num_bytes"], 8) == pytest.approx(call["seconds"])
    assert compute_seconds(2 * 4**9, 8) == pytest.approx(2 * calls[-1]["seconds"]), "as fast as the largest"
    assert compute_seconds(1, 8) == pytest.approx(calls[0]["seconds"]), "not shorter than the smallest"
    assert calls[0]["seconds"] < compute_seconds(4**6, 8) < calls[1]["seconds"]
    assert compute_seconds(3 * 4**7, 8, messages=3) == pytest.approx(3 * calls[1]["seconds"])
    known = replace(rates, collectives={})
    for ranks, name in ((4, "all_gather"), (16, "all_gather"), (8, "all_reduce")):
        assert compute_seconds(4**7, ranks, name=name) == compute_call_seconds(
            name, 4**7, ranks, 1, 1, 8, known
        ), "by its link"
    sizes, groups = np.array([4.0**6, 4.0**7, 4.0**12]), np.array([8, 4, 8])
    many = compute_seconds(sizes, groups)
    assert list(many) == pytest.approx([compute_seconds(*one) for one in zip(sizes, groups, strict=True)])


def test_noisy_collective_times_never_fall_with_the_size() -> None:
    calls = [
        {"collective": "all_reduce", "num_bytes": size, "seconds": seconds}
        for size, seconds in ((2**14, 2e-4), (2**16, 1e-4), (2**18, 3e-4))
    ]
    curve = make_calibration(collectives=calls).rates(CPU).collectives["all_reduce"]
    assert [curve.seconds(2**power, 1) for power in (14, 16, 18)] == pytest.approx([1e-4, 1e-4, 3e-4])


def test_host_copies_have_the_speed_of_the_slower_direction() -> None:
    copies = [
        {"direction": way, "num_bytes": size, "seconds": 1e-5 + size / speed}
        for way, speed in (("to_gpu", 20e9), ("to_host", 10e9))
        for size in (2**20, 2**24, 2**28)
    ]
    host = (
        make_calibration("1xh100-sxm-80gb", host_copies=copies)
        .rates(ss.Cluster.parse("1xh100-sxm-80gb"))
        .host
    )
    assert host.bytes_per_second == pytest.approx(10e9, rel=1e-6)
    assert host.latency_seconds == pytest.approx(1e-5, rel=1e-6)


def test_the_source_says_if_the_machine_was_busy() -> None:
    assert "busy" not in make_calibration(load=0.1).source
    assert "busy, load 1.8" in make_calibration(load=1.8).source


def test_to_frame_has_a_row_per_measurement() -> None:
    one = make_calibration()
    frame = one.to_frame()
    points = (one.matrix_products, one.attention, one.memory_passes, one.host_copies, one.collectives)
    assert len(frame) == sum(map(len, points))
    assert str(one).endswith("in 12 s")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kernel_seconds", math.nan),
        ("kernel_seconds", 0.0),
        ("kernel_seconds", "4e-6"),
        ("host_updates_per_second", math.inf),
        ("load", -1.0),
        ("num_ranks", 0),
        ("num_ranks", 2.5),
        ("machine", ""),
        ("machine", "a\nb"),
        ("measured_at", "yesterday"),
        ("measured_at", "2026-11-21T13:00:00"),
        ("memory_passes", []),
        ("matrix_products", "many"),
        ("matrix_products", [7]),
        (
            "matrix_products",
            [{"precision": "fp32", "rows": 8, "inner": 8, "columns": 8, "seconds": math.nan}],
        ),
        ("matrix_products", [{"precision": "int3", "rows": 8, "inner": 8, "columns": 8, "seconds": 1e-3}]),
        ("matrix_products", [{"precision": "fp32", "rows": -8, "inner": 8, "columns": 8, "seconds": 1e-3}]),
        ("collectives", [{"collective": "gossip", "num_bytes": 8, "seconds": 1e-3}]),
        ("collectives", [{"collective": "send", "num_bytes": 8, "seconds": -1e-3}]),
        ("memory_passes", [{"num_bytes": 8, "seconds": 1e-3, "colour": "red"}]),
        ("host_copies", [{"direction": "sideways", "num_bytes": 8, "seconds": 1e-3}]),
    ],
)
def test_invalid_fields_are_rejected(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=r"allowed|cannot be made"):
        make_calibration(**{field: value})


def test_an_unknown_format_version_is_rejected() -> None:
    text = json.loads(make_calibration().to_json())
    text["version"] = 99
    with pytest.raises(ValueError, match="version"):
        Calibration.from_json(json.dumps(text))


positive = st.floats(1e-12, 1e-3)


@given(first=positive, second=positive)
def test_fit_two_terms_recovers_exact_sums(first: float, second: float) -> None:
    terms = [Term(x, y, first * x + second * y) for x, y in ((1.0, 1.0), (1e3, 1.0), (1e6, 1.0), (10.0, 1e3))]
    fitted = fit_two_terms(terms)
    for x, y, seconds in terms:
        assert fitted[0] * x + fitted[1] * y == pytest.approx(seconds, rel=1e-4)


@given(
    st.lists(
        st.tuples(st.floats(1e-3, 1e6), st.floats(1e-3, 1e6), st.floats(1e-6, 1e3)), min_size=1, max_size=8
    )
)
def test_fit_two_terms_never_returns_negative_terms(points: list[tuple[float, float, float]]) -> None:
    first, second = fit_two_terms([Term(*point) for point in points])
    assert first >= 0 and second >= 0 and first + second > 0
