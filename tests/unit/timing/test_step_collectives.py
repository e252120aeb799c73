"""Tests of the time of one collective: textbook formulas, NCCL's algorithms, and placement on nodes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise, product
from math import lcm
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardscope as ss
from shardscope.catalog import links
from shardscope.timing.collectives import (
    Placement,
    compute_placed_seconds,
    compute_transfer_seconds,
    crosses_nodes,
    find_bounding_link,
    place_groups,
)
from shardscope.timing.rates import MeasuredCalls, look_up_rates
from shardscope.timing.traffic import Collective, Transfer

NODE, TWO, MANY = (ss.Cluster.parse(f"{n}8xh100-sxm-80gb") for n in ("", "2x", "64x"))
RATES = look_up_rates(MANY)
COLLECTIVES: tuple[Collective, ...] = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send")


def build_transfer(collective: Collective, num_bytes: Any, ranks: Any, stride: Any = 1) -> Transfer:
    return Transfer("gathers", collective, num_bytes, ranks, stride, 1)


def compute_seconds(collective: Collective, num_bytes: Any, ranks: Any, stride: Any = 1) -> Any:
    return compute_transfer_seconds(build_transfer(collective, num_bytes, ranks, stride), 8, RATES)


def test_ring_collective_times_equal_the_textbook_formula() -> None:
    link = RATES.inside
    expected = 7 / 8 * 8e9 / link.bytes_per_second + 7 * link.latency_seconds
    assert compute_seconds("all_gather", 8e9, 8) == pytest.approx(expected)
    assert compute_seconds("reduce_scatter", 8e9, 8) == pytest.approx(expected)
    assert compute_seconds("all_reduce", 8e9, 8) == pytest.approx(2 * expected)
    assert compute_seconds("all_gather", 8e9, 1) == 0


def test_groups_across_nodes_use_the_inter_node_link() -> None:
    # Sixteen ranks use eight network cards at once; two ranks of different nodes use one.
    inside, whole, pair = (
        compute_seconds("all_gather", 1e10, 8),
        compute_seconds("all_gather", 1e10, 16),
        compute_seconds("all_gather", 1e10, 2, 8),
    )
    assert inside < whole < pair
    assert pair == pytest.approx(1e10 / 2 / RATES.between.bytes_per_second, rel=0.01)


def test_small_all_reduces_use_a_tree_of_lower_latency() -> None:
    """Among 512 nodes a ring has a thousand steps, a tree eighteen."""
    small = compute_seconds("all_reduce", 8, 512, 8)
    assert small < 2 * 512 * RATES.between.latency_seconds / 4
    assert compute_seconds("all_gather", 8, 64) < compute_seconds("all_gather", 8, 512)


def test_all_to_all_uses_the_network_card_of_every_rank() -> None:
    expected = 56 / 64 * 1e9 / RATES.between.bytes_per_second
    assert compute_seconds("all_to_all", 1e9, 64) == pytest.approx(expected, rel=0.01)
    assert compute_seconds("all_to_all", 1e9, 8) < expected / 4


def test_a_send_across_nodes_takes_as_long_as_its_slowest_hop() -> None:
    """Of 16 ranks in a ring, most send over PCIe, which is slower than the network here."""
    rates = look_up_rates(replace(MANY, intra_node_link=links["pcie-3-x16"]))
    assert rates.inside.bytes_per_second < rates.between.bytes_per_second
    ring, pair = build_transfer("send", 1e9, 16), build_transfer("send", 1e9, 2, 8)
    for transfer, link in ((ring, rates.inside), (pair, rates.between)):
        expected = 1e9 / link.bytes_per_second + link.latency_seconds
        assert compute_transfer_seconds(transfer, 8, rates) == pytest.approx(expected)
        assert find_bounding_link(transfer, 8, rates) == link


def test_find_bounding_link_returns_the_slowest_link() -> None:
    for collective in COLLECTIVES:
        assert find_bounding_link(build_transfer(collective, 1e9, 8), 8, RATES).name == "nvlink-4"
        assert find_bounding_link(build_transfer(collective, 1e9, 2, 8), 8, RATES).name == "infiniband-ndr"


@pytest.mark.parametrize(
    ("ranks", "stride", "members", "num_nodes"),
    [(8, 1, 8, 1), (16, 1, 8, 2), (4, 8, 1, 4), (4, 4, 2, 2), (2, 4, 2, 1), (512, 1, 8, 64), (1, 64, 1, 1)],
)  # fmt: skip
def test_place_groups_follows_the_rank_stride(ranks: int, stride: int, members: int, num_nodes: int) -> None:
    assert place_groups(ranks, stride, 8) == 2 * ((members, members, num_nodes),)


@pytest.mark.parametrize(
    ("ranks", "stride", "per_node", "members", "num_nodes"),
    [
        (3, 1, 5, 1, 2),
        (4, 1, 6, 2, 2),
        (2, 2, 6, 1, 2),
        (2, 4, 6, 1, 2),
        (5, 1, 8, 1, 2),
        (5, 1, 5, 5, 1),
        (3, 2, 6, 3, 1),
        (15, 1, 5, 5, 3),
    ],
)
def test_a_group_that_the_end_of_a_node_divides_is_on_two_nodes(
    ranks: int, stride: int, per_node: int, members: int, num_nodes: int
) -> None:
    """Three ranks of five GPUs a node counted as inside a node, though the second three are on two."""
    placement = place_groups(ranks, stride, per_node).most_divided
    assert (placement.fewest, placement.num_nodes) == (members, num_nodes)
    assert crosses_nodes(ranks * stride, per_node) == (num_nodes > 1)


def list_placements(ranks: int, stride: int, per_node: int) -> set[Placement]:
    """Return the placements of all groups of the smallest cluster of whole nodes and whole groups."""
    placements, span = set(), ranks * stride
    for start in range(0, lcm(span, per_node), span):
        for first in range(start, start + stride):
            nodes = Counter(rank // per_node for rank in range(first, first + span, stride))
            placements.add(Placement(min(nodes.values()), max(nodes.values()), len(nodes)))
    return placements


LAYOUTS = [*product(range(1, 14), range(1, 12), range(1, 11)), (200, 1, 6), (81, 4, 18), (97, 5, 16)]
"""Ranks, stride and GPUs per node."""


def test_the_slowest_groups_are_those_that_an_enumeration_of_all_groups_finds() -> None:
    """Of two ranks four GPUs apart on nodes of six GPUs, GPUs 2 and 6 are on two nodes."""
    for ranks, stride, per_node in LAYOUTS:
        placements, groups = list_placements(ranks, stride, per_node), place_groups(ranks, stride, per_node)
        assert placements.issuperset(groups), (ranks, stride, per_node)
        is_divided = any(one.num_nodes > 1 for one in placements)
        assert (groups.most_divided.num_nodes > 1) == is_divided, (ranks, stride, per_node)
        if ranks > 1:
            assert crosses_nodes(ranks * stride, per_node) == is_divided, (ranks, stride, per_node)


@pytest.mark.parametrize("inside", ["nvlink-4", "pcie-3-x16"])
@pytest.mark.parametrize("num_bytes", [8, 1e6, 1e10])
def test_the_slowest_of_all_groups_decides(inside: str, num_bytes: float) -> None:
    rates = look_up_rates(replace(MANY, intra_node_link=links[inside]))
    for ranks, stride, per_node in product(range(2, 12), range(1, 8), (3, 4, 5, 6, 8)):
        placements = list_placements(ranks, stride, per_node)
        for collective in COLLECTIVES:
            transfer = build_transfer(collective, num_bytes, ranks, stride)
            slowest = max(
                compute_placed_seconds(collective, num_bytes, ranks, one, 1, rates) for one in placements
            )
            assert compute_transfer_seconds(transfer, per_node, rates) == slowest, (ranks, stride, per_node)


def test_a_tied_embedding_is_reduced_inside_of_a_node_at_any_distance() -> None:
    """First and last of four stages on eight GPUs are six GPUs apart: the only such groups, on one node."""
    layout = ss.Layout.megatron(pp=4)
    plan = ss.Plan(ss.models["gpt2"], NODE, ss.Recipe(global_batch_size=64, seq_len=1024), layout)
    slow = replace(NODE, inter_node_link=links["ethernet-25g"])
    assert replace(plan, cluster=slow).step().seconds == plan.step().seconds


def test_sharding_with_tensor_parallelism_on_nodes_of_six_waits_for_the_network() -> None:
    """Shards four GPUs apart counted as inside a node, though the checks said that they cross."""
    layout = ss.Layout.fsdp2(tp=4, shard=2, replicate=3)
    cluster = replace(ss.Cluster.parse("4x6xh100-sxm-80gb"), inter_node_link=links["ethernet-25g"])
    recipe = ss.Recipe(global_batch_size=48, seq_len=4096)
    slow = ss.Plan(ss.models["llama-3.1-8b"], cluster, recipe, layout).step()
    # As fast as on nodes of four GPUs, where every pair of shards is on two nodes.
    fours = replace(ss.Cluster.parse("6x4xh100-sxm-80gb"), inter_node_link=links["ethernet-25g"])
    equal = ss.Plan(ss.models["llama-3.1-8b"], fours, recipe, layout).step()
    assert slow.parts["gathers"] == pytest.approx(equal.parts["gathers"])


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("inside", ["nvlink-4", "pcie-3-x16"])
def test_a_step_waits_for_the_slowest_of_groups_on_one_and_on_two_nodes(
    collective: Collective, inside: str
) -> None:
    rates = look_up_rates(replace(MANY, intra_node_link=links[inside]))
    transfer = build_transfer(collective, 1e14, 4)
    seconds, whole = (compute_transfer_seconds(transfer, per_node, rates) for per_node in (6, 4))
    # As of two nodes of two GPUs each.
    halves = compute_transfer_seconds(transfer, 2, rates)
    assert seconds == max(whole, halves)
    bounding = find_bounding_link(transfer, 6, rates)
    for name, link in (("inside", rates.inside), ("between", rates.between)):
        faster = replace(rates, **{name: link._replace(bytes_per_second=1.01 * link.bytes_per_second)})
        is_shorter = compute_transfer_seconds(transfer, 6, faster) < 0.999 * seconds
        assert is_shorter == (bounding == link), name


def test_arrays_have_groups_on_one_and_on_two_nodes() -> None:
    ranks = np.array([1, 2, 3, 4, 6, 12])
    together = compute_transfer_seconds(build_transfer("all_gather", 1e9, ranks), 6, RATES)
    alone = [compute_transfer_seconds(build_transfer("all_gather", 1e9, int(n)), 6, RATES) for n in ranks]
    assert together == pytest.approx(alone, rel=1e-12)
    assert alone[3] > alone[4]


@given(
    collective=st.sampled_from(COLLECTIVES),
    sizes=st.lists(st.floats(1, 1e11), min_size=2, max_size=6),
    ranks=st.sampled_from([2, 4, 8, 16, 64, 512]),
    stride=st.sampled_from([1, 2, 8, 64]),
)
def test_collective_time_never_falls_with_the_bytes(
    collective: Collective, sizes: list[float], ranks: int, stride: int
) -> None:
    seconds = [compute_seconds(collective, size, ranks, stride) for size in sorted(sizes)]
    assert all(first <= second for first, second in pairwise(seconds))


@given(collective=st.sampled_from(COLLECTIVES), size=st.floats(1, 1e11))
def test_arrays_of_groups_equal_single_groups(collective: Collective, size: float) -> None:
    ranks, strides = (grid.ravel() for grid in np.meshgrid([1, 2, 8, 16, 64], [1, 2, 4, 8, 16]))
    together = compute_seconds(collective, size, ranks, strides)
    alone = [compute_seconds(collective, size, int(r), int(s)) for r, s in zip(ranks, strides, strict=True)]
    assert together == pytest.approx(alone, rel=1e-12)


def test_measured_calls_are_interpolated_for_arrays_and_numbers() -> None:
    measured = MeasuredCalls(8, (2.0, 5.0, 9.0), (-9.0, -8.0, -4.0))
    sizes = np.exp(np.array([0.0, 2.0, 3.3, 7.0, 9.0, 12.0]))
    # Smaller calls take as long as the smallest one; larger ones have the bandwidth of the largest.
    expected = np.exp(np.array([-9.0, -9.0, -9.0 + 1.3 / 3, -6.0, -4.0, -1.0]))
    assert measured.seconds(sizes, 1) == pytest.approx(expected)
    assert [measured.seconds(size, 1) for size in sizes] == pytest.approx(expected)
    assert measured.seconds(8 * sizes, 8) == pytest.approx(8 * expected)


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("inside", ["nvlink-4", "pcie-3-x16"])
def test_only_a_faster_bounding_link_shortens_a_large_transfer(collective: Collective, inside: str) -> None:
    rates = look_up_rates(replace(MANY, intra_node_link=links[inside]))
    for ranks, stride in product((2, 4, 8, 16, 64, 512), (1, 2, 4, 8, 64)):
        transfer = build_transfer(collective, 1e14, ranks, stride)
        bounding, seconds = (
            find_bounding_link(transfer, 8, rates),
            compute_transfer_seconds(transfer, 8, rates),
        )
        for name, link in (("inside", rates.inside), ("between", rates.between)):
            faster = replace(rates, **{name: link._replace(bytes_per_second=1.01 * link.bytes_per_second)})
            is_shorter = compute_transfer_seconds(transfer, 8, faster) < 0.999 * seconds
            assert is_shorter == (bounding == link), (ranks, stride, name)


@pytest.mark.parametrize(("ranks", "link"), [(8, RATES.inside), (64, RATES.between)])
def test_each_message_of_an_all_to_all_waits_for_one_latency(ranks: int, link: Any) -> None:
    transfer = build_transfer("all_to_all", 1.0, ranks)
    expected = 5 * link.latency_seconds
    assert compute_transfer_seconds(transfer._replace(num_messages=5), 8, RATES) == pytest.approx(
        expected, rel=1e-3
    )
