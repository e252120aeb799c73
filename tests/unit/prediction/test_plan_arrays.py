"""A plan by itself and a plan in an array of plans: the same bytes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.requirements import examples
from tests.unit.random_plans import plans

import shardscope as ss
from shardscope.core.layout import Layout
from shardscope.core.ops import ceil_div, map_distinct, maximum, minimum, where
from shardscope.core.plan import Plan
from shardscope.prediction.batch.memory import compute_peaks

MADE_BY = {
    "ddp": Layout.ddp,
    "fsdp2": Layout.fsdp2,
    "deepspeed": partial(Layout.zero, 1),
    "megatron": Layout.megatron,
}
"""What makes each framework's layout."""


def neighbours(a_plan: Plan) -> list[Plan]:
    """The plan, and all that differ from it in degrees and batch sizes only and can run."""
    found = [a_plan]
    degrees = [
        field for field in ("tp", "pp", "vpp", "cp", "ep", "replicate") if hasattr(a_plan.layout, field)
    ]
    for values in product((1, 2, 4), repeat=min(3, len(degrees))):
        for micro in (1, 3):
            recipe = replace(a_plan.recipe, micro_batch_size=micro, global_batch_size=micro * 384)
            changes: dict[str, Any] = dict(zip(degrees, values, strict=False))
            try:
                found.append(replace(a_plan, recipe=recipe, layout=replace(a_plan.layout, **changes)))
            except ValueError:
                continue
    return found


@pytest.mark.parametrize("framework", MADE_BY)
@settings(max_examples=examples(25), deadline=None)
@given(st.data())
def test_an_array_of_plans_has_the_bytes_of_each(framework: str, data: st.DataObject) -> None:
    several = [plan for _ in range(2) for plan in neighbours(data.draw(plans(framework)))]
    one_by_one = [plan.memory().peak_bytes for plan in several]
    assert compute_peaks(several).tolist() == one_by_one


@pytest.mark.parametrize("framework", MADE_BY)
@pytest.mark.parametrize("name", ["llama-3.1-405b", "deepseek-v3", "mixtral-8x7b"])
def test_a_grid_of_a_large_model(framework: str, name: str) -> None:
    cluster = ss.Cluster.parse("16x8xh100-sxm-80gb")
    base = Plan(ss.models[name], cluster, ss.Recipe(global_batch_size=384), MADE_BY[framework]())
    several = neighbours(base)
    assert len({plan.degrees for plan in several}) > (5 if framework in ("fsdp2", "megatron") else 0)
    found = compute_peaks(several)
    assert found.dtype == np.int64
    assert found.tolist() == [plan.memory().peak_bytes for plan in several]


def test_no_plans_are_no_bytes() -> None:
    assert compute_peaks([]).shape == (0,)


def test_arithmetic_means_the_same_for_numbers_and_arrays() -> None:
    left, right = np.array([1, 7, 7, 12]), np.array([3, 7, 2, 5])
    for function in (minimum, maximum, ceil_div, lambda a, b: where(a > b, a, b)):
        one_by_one = [function(int(a), int(b)) for a, b in zip(left, right, strict=True)]
        assert function(left, right).tolist() == one_by_one


def test_what_is_counted_one_by_one_is_counted_once_for_each_distinct_row() -> None:
    asked = []

    def pair(first: int, second: int) -> tuple[int, int]:
        asked.append((first, second))
        return first + second, first * second

    total, product_ = map_distinct(pair, np.array([2, 3, 2]), 5)
    assert (total.tolist(), product_.tolist()) == ([7, 8, 7], [10, 15, 10])
    assert sorted(asked) == [(2, 5), (3, 5)]
    assert map_distinct(pair, 2, 5) == (7, 10)


def test_second_partitions_are_counted_of_many_plans_at_once() -> None:
    arch = ss.models["llama-3.1-8b"]
    chosen = [
        ss.Plan(
            arch,
            ss.Cluster.parse(gpus),
            ss.Recipe(seq_len=512, micro_batch_size=size, global_batch_size=64),
            ss.Layout.zero(3, zero_hpz_partition_size=2),
        )
        for gpus in ("8xh100-sxm-80gb", "2x8xh100-sxm-80gb")
        for size in (1, 2)
    ]
    assert compute_peaks(chosen).tolist() == [plan.memory().peak_bytes for plan in chosen]
