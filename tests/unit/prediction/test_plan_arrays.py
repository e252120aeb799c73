"""Tests of predictions for arrays of plans: equal to those of single plans."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.requirements import examples, sample
from tests.unit.random_plans import plans

import shardscope as ss
from shardscope.core.layout import Layout
from shardscope.core.ops import ceil_div, map_distinct, maximum, minimum, where
from shardscope.core.plan import Plan
from shardscope.prediction.batch.column import Column
from shardscope.prediction.batch.memory import compute_peaks

LAYOUTS = {
    "ddp": Layout.ddp,
    "fsdp2": Layout.fsdp2,
    "deepspeed": partial(Layout.zero, 1),
    "megatron": Layout.megatron,
}
"""Constructor of each framework's layout."""


def list_neighbors(a_plan: Plan) -> list[Plan]:
    """Return the plan and all valid plans that differ only in degrees and batch sizes."""
    neighbors = [a_plan]
    degrees = [
        field for field in ("tp", "pp", "vpp", "cp", "ep", "replicate") if hasattr(a_plan.layout, field)
    ]
    for values in product((1, 2, 4), repeat=min(3, len(degrees))):
        for micro in (1, 3):
            recipe = replace(a_plan.recipe, micro_batch_size=micro, global_batch_size=micro * 384)
            changes: dict[str, Any] = dict(zip(degrees, values, strict=False))
            try:
                neighbors.append(replace(a_plan, recipe=recipe, layout=replace(a_plan.layout, **changes)))
            except ValueError:
                continue
    return neighbors


@sample(2)
@pytest.mark.parametrize("framework", LAYOUTS)
@settings(max_examples=examples(25), deadline=None)
@given(st.data())
def test_peaks_of_an_array_equal_those_of_single_plans(framework: str, data: st.DataObject) -> None:
    several = [plan for _ in range(2) for plan in list_neighbors(data.draw(plans(framework)))]
    one_by_one = [plan.memory().peak_bytes for plan in several]
    assert compute_peaks(several).tolist() == one_by_one


@pytest.mark.parametrize("framework", LAYOUTS)
@pytest.mark.parametrize("name", ["llama-3.1-405b", "deepseek-v3", "mixtral-8x7b"])
def test_peaks_of_a_grid_equal_those_of_single_plans(framework: str, name: str) -> None:
    cluster = ss.Cluster.parse("16x8xh100-sxm-80gb")
    base = Plan(ss.models[name], cluster, ss.Recipe(global_batch_size=384), LAYOUTS[framework]())
    several = list_neighbors(base)
    assert len({plan.degrees for plan in several}) > (5 if framework in ("fsdp2", "megatron") else 0)
    peaks = compute_peaks(several)
    assert peaks.dtype == np.int64
    assert peaks.tolist() == [plan.memory().peak_bytes for plan in several]


@pytest.mark.parametrize("stage", [None, 1, 3])
@pytest.mark.parametrize("interval", [1, 3])
def test_peaks_of_a_grid_equal_those_of_single_plans_if_windows_mix(stage: int | None, interval: int) -> None:
    """In fp32 the layers without a window materialize their scores, and some stages have no such layer."""
    recipe = ss.Recipe(
        seq_len=6000,
        global_batch_size=384,
        precision="fp32",
        recompute="selective",
        recompute_interval=interval,
    )
    layout = Layout.fsdp2() if stage is None else Layout.zero(stage)
    several = list_neighbors(
        Plan(ss.models["gemma-3-4b"], ss.Cluster.parse("16x8xh100-sxm-80gb"), recipe, layout)
    )
    assert compute_peaks(several).tolist() == [plan.memory().peak_bytes for plan in several]


def test_an_empty_array_of_plans_has_no_peaks() -> None:
    assert compute_peaks([]).shape == (0,)


def test_operators_are_equal_for_numbers_and_arrays() -> None:
    left, right = np.array([1, 7, 7, 12]), np.array([3, 7, 2, 5])
    for function in (minimum, maximum, ceil_div, lambda a, b: where(a > b, a, b)):
        one_by_one = [function(int(a), int(b)) for a, b in zip(left, right, strict=True)]
        assert function(left, right).tolist() == one_by_one


def test_map_distinct_calls_the_function_once_per_distinct_row() -> None:
    calls = []

    def add_and_multiply(first: int, second: int) -> tuple[int, int]:
        calls.append((first, second))
        return first + second, first * second

    total, product_ = map_distinct(add_and_multiply, np.array([2, 3, 2]), 5)
    assert (total.tolist(), product_.tolist()) == ([7, 8, 7], [10, 15, 10])
    assert sorted(calls) == [(2, 5), (3, 5)]
    assert map_distinct(add_and_multiply, 2, 5) == (7, 10)


def test_peaks_of_an_array_include_zeropp_secondary_partitions() -> None:
    arch = ss.models["llama-3.1-8b"]
    several = [
        ss.Plan(
            arch,
            ss.Cluster.parse(gpus),
            ss.Recipe(seq_len=512, micro_batch_size=size, global_batch_size=64),
            ss.Layout.zero(3, zero_hpz_partition_size=2),
        )
        for gpus in ("8xh100-sxm-80gb", "2x8xh100-sxm-80gb")
        for size in (1, 2)
    ]
    assert compute_peaks(several).tolist() == [plan.memory().peak_bytes for plan in several]


def count_columns() -> int:
    gc.collect()
    return sum(type(one) is Column for one in gc.get_objects())


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_search_leaves_no_columns_in_memory(method: Any) -> None:
    """A formula's cache that keeps columns would keep the arrays of every search of a notebook.

    The ranking keeps none either, also before a garbage collection: on thousands of GPUs they take hundreds
    of MiB.
    """
    before = count_columns()
    gc.disable()
    try:
        ranking = ss.search(
            ss.models["llama-3.1-8b"],
            ss.Cluster.parse("2x8xh100-sxm-80gb"),
            ss.Recipe(seq_len=1000, method=method),
        )
        columns = sum(type(one) is Column for one in gc.get_objects())
    finally:
        gc.enable()
    assert columns <= before
    assert ranking.best is not None
