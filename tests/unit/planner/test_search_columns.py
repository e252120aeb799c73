"""Tests of columns of many plans: equal to row-by-row arithmetic and to simulated schedules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.requirements import examples
from tests.unit.random_plans import LATENT, LLAMA, MOE

from shardscope.core.ops import (
    all_true,
    cache_by_numbers,
    ceil_div,
    group_equal,
    largest_sum,
    map_distinct,
    maximum,
    minimum,
    where,
)
from shardscope.frameworks.distinct_values import Distinct
from shardscope.frameworks.megatron.memory.layer import Layer
from shardscope.frameworks.megatron.memory.pipeline import (
    SchedulePeaks,
    compute_schedule_peaks,
    count_chunk_layers,
)
from shardscope.frameworks.megatron.pipeline_split import can_split_pipeline
from shardscope.prediction.batch.column import Column, sum_columns
from shardscope.prediction.batch.object_batch import build_batch
from shardscope.prediction.batch.rows import Rows
from shardscope.timing.pipeline import Schedule, iterate_passes

KEYS = ("a", "b", "c")
OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "plus": lambda x, y: x + y,
    "minus": lambda x, y: x - y,
    "times": lambda x, y: x * y,
    "whole parts": lambda x, y: x // (y * y + 1),
    "rest": lambda x, y: x % (y * y + 1),
    "parts": lambda x, y: x / (y * y + 1),
    "rounded up": lambda x, y: ceil_div(x, y * y + 1),
    "largest": lambda x, y: maximum(x, y, 3),
    "smallest": minimum,
    "of two": lambda x, y: where(x > y, x, y * 2),
    "condition": lambda x, y: (x >= y) * x + (x == y) * 5 + ((x < y) & (y > 0)),
    "from a number": lambda x, y: 7 - x + 12 // (y * y + 1) + 2 * (3 - y),
    "by value": lambda x, y: group_equal(x * y) + group_equal(x % 3),
    "looked up": lambda x, y: map_distinct(lambda p, q: 10 * p + q % 2, x, y),
}


@st.composite
def tables(draw: Any) -> tuple[Rows, dict[str, Any], dict[str, Any]]:
    """Rows, and of each key a column and its numbers row by row."""
    number = draw(st.integers(1, 30))
    keys = {name: draw(st.lists(st.integers(0, 4), min_size=number, max_size=number)) for name in KEYS}
    rows = Rows([np.array(codes, np.int64) for codes in keys.values()])
    columns, plain = {}, {}
    for bit, (name, codes) in enumerate(keys.items()):
        values = np.array(draw(st.lists(st.integers(-6, 9), min_size=5, max_size=5)), np.int64)
        plain[name] = values[np.array(codes)]
        columns[name] = rows.build_column(1 << bit, plain[name])
    return rows, columns, plain


@settings(max_examples=examples(150), deadline=None)
@given(tables(), st.lists(st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 9)), max_size=6))
def test_column_arithmetic_equals_row_arithmetic(table: Any, steps: list[tuple[str, int]]) -> None:
    rows, columns, plain = table
    values = [[int(number) for number in plain[name]] for name in KEYS]
    found: list[Any] = [columns[name] for name in KEYS]
    for operation, place in steps:
        function = OPERATIONS[operation]
        left, right = place % len(found), (place * 7 + 1) % len(found)
        both = zip(values[left], values[right], strict=True)
        one_by_one = [function(x, y) for x, y in both]
        many = function(found[left], found[right])
        assert rows.expand(many).tolist() == pytest.approx(one_by_one)
        if operation != "parts":  # divided numbers would not stay whole
            values.append(one_by_one)
            found.append(many)
        if place == 9:
            rows.drop_unused_results()


def test_results_that_are_read_again_are_not_dropped() -> None:
    rows = Rows([np.arange(5)])
    column: Any = rows.build_column(1, np.arange(5))
    total, product = column + 7, column * 7
    rows.drop_unused_results()
    assert column + 7 is total  # read again, so kept
    rows.drop_unused_results()
    assert column + 7 is total
    again = column * 7
    assert again is not product
    assert rows.expand(again).tolist() == rows.expand(product).tolist()


def test_equal_columns_of_functions_are_one_after_results_are_dropped() -> None:
    rows = Rows([np.arange(5)])
    column: Any = rows.build_column(1, np.arange(5))
    parity = Column.map_distinct(lambda number: number % 2, column)
    rows.drop_unused_results()
    assert Column.map_distinct(lambda number: number & 1, column) is parity


@settings(max_examples=examples(50), deadline=None)
@given(tables())
def test_sums_and_largest_of_several_columns(table: Any) -> None:
    rows, columns, plain = table
    several = [columns["a"], columns["b"] * columns["c"], 4, columns["a"] + columns["b"], columns["c"]]
    arrays = [plain["a"], plain["b"] * plain["c"], 4, plain["a"] + plain["b"], plain["c"]]
    assert rows.expand(sum_columns(several)).tolist() == sum(arrays[1:], arrays[0]).tolist()
    expected = np.max([np.broadcast_to(array, plain["a"].shape) for array in arrays], axis=0)
    assert rows.expand(maximum(*several)).tolist() == expected.tolist()
    pairs, array_pairs = list(pairwise(several)), list(pairwise(arrays))
    expected = np.max([np.broadcast_to(x + y, plain["a"].shape) for x, y in array_pairs], axis=0)
    assert rows.expand(largest_sum(pairs)).tolist() == expected.tolist()


@settings(max_examples=examples(150), deadline=None)
@given(tables(), st.permutations([*range(5)]))
def test_columns_with_different_keys_combine_in_any_order(table: Any, order: list[int]) -> None:
    """Keys that tell the same rows apart are one to whoever joins them, under whatever names they come."""
    rows, columns, plain = table

    def combine(numbers: dict[str, Any]) -> list[Any]:
        a, b, c = (numbers[name] for name in KEYS)
        five = [100 * a + b, 100 * b + c, 100 * c + a, group_equal(a * b + c), group_equal(c % 3) + 10 * a]
        return [five[place] for place in order]

    first, second, third, *more = combine(columns)
    x, y, z, *others = combine(plain)
    assert (
        rows.expand(where(first > second, third, more[0])).tolist() == np.where(x > y, z, others[0]).tolist()
    )
    assert rows.expand(sum_columns([first, third, *more])).tolist() == sum([x, z, *others]).tolist()
    expected = np.max([x, y, z, *others], axis=0).tolist()
    assert rows.expand(maximum(first, second, third, *more)).tolist() == expected
    pairs = [(first, third), (second, third), (third, more[0]), (more[1], first)]
    array_pairs = [(x, z), (y, z), (z, others[0]), (others[1], x)]
    expected = np.max([one + other for one, other in array_pairs], axis=0).tolist()
    assert rows.expand(largest_sum(pairs)).tolist() == expected
    # What was combined is as before.
    for column, array in zip([first, second, third, *more], [x, y, z, *others], strict=True):
        assert rows.expand(column).tolist() == array.tolist()
    found = rows.expand(map_distinct(lambda p, q, r: 3 * p + q * r, first, more[1], second))
    assert found.tolist() == (3 * x + others[1] * y).tolist()


def test_derived_keys_add_no_rows() -> None:
    """A key that was made of others adds no rows to them, and nobody looks which rows agree."""
    keys = np.arange(12)
    rows = Rows([keys % 3, keys // 3])
    one, other = rows.build_column(1, keys % 3 + 1), rows.build_column(2, keys // 3)
    both, coarse = one * 10 + other, group_equal((one > 1) * 5 + other // 2)
    assert len(coarse.values) < len(both.values)
    assert rows.join(both.keys, coarse.keys)[:2] == (both.keys, None)
    assert rows.join(coarse.keys, both.keys)[::2] == (both.keys, None)
    assert rows.expand(both + coarse).tolist() == (rows.expand(both) + rows.expand(coarse)).tolist()


def test_a_column_has_one_value_per_distinct_key() -> None:
    keys = np.arange(12)
    rows = Rows([keys % 3, keys // 3])
    third, quarter = rows.build_column(1, keys % 3 + 1), rows.build_column(2, 2 ** (keys // 3))
    assert len(third.values) == 3
    assert len((third * 5 + 1).values) == 3
    assert len((third * quarter).values) == 12
    assert len(group_equal((third > 1) * quarter).values) == 5
    assert rows.build_column(1, np.full(12, 7)) == 7
    assert map_distinct(lambda one, other: 4, third, quarter) == 4
    # A key that follows from others adds no rows.
    follows = Rows([keys % 3, keys // 3, keys])
    whole, part = follows.build_column(4, keys), follows.build_column(1, keys % 3)
    assert len((whole + part).values) == 12
    assert follows.expand(whole + part).tolist() == (keys + keys % 3).tolist()


def test_a_column_cannot_be_a_condition() -> None:
    rows = Rows([np.arange(3)])
    column = rows.build_column(1, np.arange(3))
    with pytest.raises(TypeError, match="where"):
        bool(column > 1)
    assert all_true(column >= 0)
    assert not all_true(column > 0)
    assert np.sqrt(column).values.tolist() == pytest.approx([0, 1, 2**0.5])


def test_tuple_results_become_columns() -> None:
    class Pair(NamedTuple):
        first: int
        second: int

    rows = Rows([np.arange(6) % 3])
    results = []

    def make_pair(number: int) -> Pair:
        results.append(number)
        return Pair(number // 2, 9)

    found = map_distinct(make_pair, rows.build_column(1, np.arange(6) % 3))
    assert sorted(results) == [0, 1, 2]
    assert isinstance(found, Pair)
    assert isinstance(found.first, Column)
    assert rows.expand(found.first).tolist() == [0, 0, 1, 0, 0, 1]
    assert found.second == 9


def test_properties_and_methods_are_evaluated_over_columns() -> None:
    class Noun:
        size = 2

        @property
        def double(self) -> Any:
            return 2 * self.size

        def times(self, number: int) -> Any:
            return self.double * number

    rows = Rows([np.arange(3)])
    several = build_batch(Noun, Noun(), size=rows.build_column(1, np.array([1, 5, 2])))
    assert several.double.values.tolist() == [2, 10, 4]
    assert several.times(3).values.tolist() == [6, 30, 12]


def simulate_schedule(arch: Any, numbers: tuple[int, ...], dense: Layer, moe: Layer) -> SchedulePeaks:
    """Simulate the bytes of a stage, step by step through its schedule."""
    pp, vpp, number, micro_batches = numbers
    layers = count_chunk_layers(arch, pp, vpp, number)
    saved = [a * dense.saved + b * moe.saved for a, b in layers]
    gone = 0 if moe.retained else moe.saved
    working = [
        max(
            (b > 0) * (moe.working + (b - 1) * moe.retained),
            (a > 0) * (dense.working - b * (gone - moe.retained)),
        )
        for a, b in layers
    ]
    ending = [moe.ending if b else dense.ending * (a > 0) for a, b in layers]
    held = [0] * vpp
    waiting = forward = head = backward = last = first = chunks = 0
    schedule: Schedule = "1f1b" if vpp == 1 else "interleaved"
    for is_forward, chunk, _ in iterate_passes(schedule, pp, vpp, number, micro_batches):
        if is_forward:
            held[chunk] += 1
            waiting += saved[chunk]
            forward = max(forward, waiting + ending[chunk])
            if chunk == vpp - 1:
                head = max(head, waiting)
            continue
        if not chunks:
            first, chunks = held[0], sum(held)
        backward = max(backward, waiting + working[chunk])
        held[chunk] -= 1
        waiting -= saved[chunk]
        if chunk == 0:
            last = max(last, waiting + layers[chunk][1] * 2 * moe.retained)
    return SchedulePeaks(forward, head, backward, last, 0, 0, first, chunks)


@settings(max_examples=examples(80), deadline=None)
@given(st.data())
def test_stage_bytes_equal_the_simulated_schedule(data: st.DataObject) -> None:
    arch: Any = data.draw(st.sampled_from([LLAMA, MOE, LATENT]))
    chunks = [
        (pp, vpp)
        for pp in range(2, 9)
        for vpp in range(1, 12)
        if can_split_pipeline(arch.num_hidden_layers, pp, vpp)
    ]
    pp, vpp = data.draw(st.sampled_from([(1, 1), *chunks]))
    number = data.draw(st.integers(0, pp - 1))
    micro_batches = pp * data.draw(st.integers(1, 2)) if vpp > 1 else data.draw(st.integers(1, 2 * pp))
    some = st.integers(1, 1000)
    dense = Layer(*(data.draw(some) for _ in range(3)))
    moe = Layer(*(data.draw(some) for _ in range(3)), data.draw(st.sampled_from([0, 1, 300])))
    if not arch.num_moe_layers:
        moe = Layer(0, 0, 0, 0)
    if arch.num_moe_layers == arch.num_hidden_layers:
        dense = Layer(0, 0, 0, 0)

    class Stand:
        architecture = arch
        degrees = type("Degrees", (), {"pp": pp, "vpp": vpp})
        num_micro_batches = micro_batches

    plan: Any = Stand
    found = compute_schedule_peaks(plan, number, dense, moe)
    expected = simulate_schedule(arch, (pp, vpp, number, micro_batches), dense, moe)
    assert found._replace(dense=0, moe=0) == expected


def test_repeated_calls_return_the_cached_column() -> None:
    rows = Rows([np.arange(4)])
    column = rows.build_column(1, np.arange(4))
    assert column + 1 is column + 1
    assert where(column > 1, column, 7) is where(column > 1, column, 7)
    # Functions are told apart by their answers, numbers by their types as well.
    assert map_distinct(lambda number: 2 * number, column) is map_distinct(
        lambda number: number + number, column
    )
    assert (column * 2).values.dtype == np.int64
    assert (column * 2.0).values.dtype == np.float64
    assert map_distinct(float, column).values.dtype == np.float64
    assert map_distinct(int, column).values.dtype == np.int64
    before = column + 1
    rows.clear_results()
    assert column + 1 is not before
    assert (column + 1).values.tolist() == before.values.tolist()


def test_partials_are_cached_and_defaults_distinguish_functions() -> None:
    results: list[tuple[int, int]] = []

    def scale(by: int, number: int) -> int:
        results.append((by, number))
        return by * number

    rows = Rows([np.arange(4)])
    column = rows.build_column(1, np.array([1, 2, 3, 4]))
    first = map_distinct(partial(scale, 2), column)
    assert map_distinct(partial(scale, 2), column) is first and len(results) == 4
    assert map_distinct(partial(scale, 3), column).values.tolist() == [3, 6, 9, 12]
    found = [map_distinct(lambda number, by=by: by * number, column).values.tolist() for by in (2, 5)]
    assert found == [[2, 4, 6, 8], [5, 10, 15, 20]]


def test_nested_tuples_are_looked_up_whole() -> None:
    column = Rows([np.arange(3)]).build_column(1, np.array([1, 2, 3]))
    inner, flat = map_distinct(lambda number: ((number, 7), -number), column)
    assert inner[0].values.tolist() == [1, 2, 3] and inner[1] == 7 and flat.values.tolist() == [-1, -2, -3]
    inner, flat = map_distinct(lambda number: ((number, 7), -number), np.array([1, 2, 1]))
    assert inner[0].tolist() == [1, 2, 1] and flat.tolist() == [-1, -2, -1]


def test_the_cache_is_keyed_by_column_identity() -> None:
    results: list[Any] = []

    @cache_by_numbers
    def halve(number: Any) -> Any:
        results.append(number)
        return number / 2

    rows = Rows([np.arange(2)])
    column = rows.build_column(1, np.array([2, 4]))
    assert halve(column) is halve(column) and len(results) == 1
    assert halve(rows.build_column(1, np.array([6, 8]))).values.tolist() == [3, 4]
    assert halve(1) == halve(1) == 0.5 and len(results) == 3
    assert halve(np.array([2, 4])).tolist() == halve(np.array([2, 4])).tolist() == [1, 2]
    rows.clear_results()
    halve(column)
    assert len(results) == 6


def test_grouped_rows_equal_single_rows() -> None:
    """Groups only save work: what is alike, and what stands beside it, is the same."""
    owners = np.array([0, 0, 1, 1, 1, 2])
    place = np.array([0, 1, 0, 1, 2, 0])
    of_groups = np.array([5, 6, 5])
    groups = Rows([place], Distinct(3, owners, np.array([0, 2, 5])), [np.array([0, 1, 0])])
    plain = Rows([np.array([0, 0, 1, 1, 1, 0]), place])
    grouped, alone = groups.build_column_of_groups(1, of_groups), plain.build_column(1, of_groups[owners])
    for rows, column in ((groups, grouped), (plain, alone)):
        found = column * 10 + rows.build_column(2, place)
        assert len(found.values) == 5, "two stages of the same kind are one"
        assert rows.expand(found).tolist() == [50, 51, 60, 61, 62, 50]
        assert rows.expand(group_equal(found % 2)).tolist() == [0, 1, 0, 1, 0, 0]
