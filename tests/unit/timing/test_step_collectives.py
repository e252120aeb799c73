"""Seconds of one collective: the textbook's terms, NCCL's choices, and how groups lie on nodes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardscope as ss
from shardscope.timing.collectives import compute_transfer_seconds, find_bounding_link, place_group
from shardscope.timing.rates import MeasuredCalls, look_up_rates
from shardscope.timing.traffic import Collective, Transfer

NODE, TWO, MANY = (ss.Cluster.parse(f"{n}8xh100-sxm-80gb") for n in ("", "2x", "64x"))
RATES = look_up_rates(MANY)
COLLECTIVES: tuple[Collective, ...] = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send")


def transfer(collective: Collective, num_bytes: Any, ranks: Any, stride: Any = 1) -> Transfer:
    return Transfer("gathers", collective, num_bytes, ranks, stride, 1)


def took(collective: Collective, num_bytes: Any, ranks: Any, stride: Any = 1) -> Any:
    return compute_transfer_seconds(transfer(collective, num_bytes, ranks, stride), 8, RATES)


def test_a_ring_moves_what_the_textbook_says() -> None:
    link = RATES.inside
    expected = 7 / 8 * 8e9 / link.bytes_per_second + 7 * link.latency_seconds
    assert took("all_gather", 8e9, 8) == pytest.approx(expected)
    assert took("reduce_scatter", 8e9, 8) == pytest.approx(expected)
    assert took("all_reduce", 8e9, 8) == pytest.approx(2 * expected)
    assert took("all_gather", 8e9, 1) == 0


def test_between_nodes_the_slower_link_counts() -> None:
    # Sixteen ranks cross through eight cards at once; two ranks of different nodes through one.
    inside, whole, pair = (
        took("all_gather", 1e10, 8),
        took("all_gather", 1e10, 16),
        took("all_gather", 1e10, 2, 8),
    )
    assert inside < whole < pair
    assert pair == pytest.approx(1e10 / 2 / RATES.between.bytes_per_second, rel=0.01)


def test_small_vectors_pay_for_steps_and_a_tree_has_fewer() -> None:
    """512 nodes apart: a ring has a thousand steps, a tree eighteen."""
    small = took("all_reduce", 8, 512, 8)
    assert small < 2 * 512 * RATES.between.latency_seconds / 4
    assert took("all_gather", 8, 64) < took("all_gather", 8, 512)


def test_an_all_to_all_leaves_through_each_ranks_own_card() -> None:
    expected = 56 / 64 * 1e9 / RATES.between.bytes_per_second
    assert took("all_to_all", 1e9, 64) == pytest.approx(expected, rel=0.01)
    assert took("all_to_all", 1e9, 8) < expected / 4


def test_the_link_that_bounds_a_group_is_named() -> None:
    for collective in COLLECTIVES:
        assert find_bounding_link(transfer(collective, 1e9, 8), 8, RATES).name == "nvlink-4"
        assert find_bounding_link(transfer(collective, 1e9, 2, 8), 8, RATES).name == "infiniband-ndr"


@pytest.mark.parametrize(
    ("ranks", "stride", "members", "num_nodes"),
    [(8, 1, 8, 1), (16, 1, 8, 2), (4, 8, 1, 4), (4, 4, 2, 2), (2, 4, 2, 1), (512, 1, 8, 64), (1, 64, 1, 1)],
)  # fmt: skip
def test_groups_lie_on_nodes_as_their_stride_says(
    ranks: int, stride: int, members: int, num_nodes: int
) -> None:
    assert place_group(ranks, stride, 8) == (members, num_nodes)


@given(
    collective=st.sampled_from(COLLECTIVES),
    sizes=st.lists(st.floats(1, 1e11), min_size=2, max_size=6),
    ranks=st.sampled_from([2, 4, 8, 16, 64, 512]),
    stride=st.sampled_from([1, 2, 8, 64]),
)
def test_more_bytes_are_never_faster(
    collective: Collective, sizes: list[float], ranks: int, stride: int
) -> None:
    found = [took(collective, size, ranks, stride) for size in sorted(sizes)]
    assert all(first <= second for first, second in pairwise(found))


@given(collective=st.sampled_from(COLLECTIVES), size=st.floats(1, 1e11))
def test_arrays_of_groups_take_what_each_of_them_takes(collective: Collective, size: float) -> None:
    ranks, strides = (grid.ravel() for grid in np.meshgrid([1, 2, 8, 16, 64], [1, 2, 4, 8, 16]))
    together = took(collective, size, ranks, strides)
    alone = [took(collective, size, int(r), int(s)) for r, s in zip(ranks, strides, strict=True)]
    assert together == pytest.approx(alone, rel=1e-12)


def test_measured_calls_are_interpolated_for_arrays_too() -> None:
    measured = MeasuredCalls(8, (2.0, 5.0, 9.0), (-9.0, -8.0, -4.0))
    sizes = np.exp(np.array([0.0, 2.0, 3.3, 7.0, 9.0, 12.0]))
    # Below the smallest it takes as long, beyond the largest as many bytes a second.
    expected = np.exp(np.array([-9.0, -9.0, -9.0 + 1.3 / 3, -6.0, -4.0, -1.0]))
    assert measured.seconds(sizes, 1) == pytest.approx(expected)
    assert [measured.seconds(size, 1) for size in sizes] == pytest.approx(expected)
    assert measured.seconds(8 * sizes, 8) == pytest.approx(8 * expected)
